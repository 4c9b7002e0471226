use proptest::prelude::*;

use super::*;

const T0: Duration = Duration::ZERO;

/// A client that writes frames by hand.
struct Client {
    machine: Machine,
    events: Vec<Event>,
}

fn bytes(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    frame::put(&mut out, kind, flags, stream, payload);
    out
}

fn call() -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in [(":method", "POST"), (":scheme", "https"), (":path", "/s/M")] {
        hpack::put_field(&mut block, name.as_bytes(), value.as_bytes());
    }
    block
}

impl Client {
    fn new() -> Self {
        let mut client = Self { machine: Machine::default(), events: Vec::new() };
        let greeting = [PREFACE, &bytes(kind::SETTINGS, 0, 0, &[])].concat();
        client.feed(&greeting).unwrap();
        client
    }

    fn feed(&mut self, input: &[u8]) -> Result<(), Fault> {
        self.machine.feed(input, T0, &mut self.events)
    }

    fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Result<(), Fault> {
        self.feed(&bytes(kind, flags, stream, payload))
    }

    fn open(&mut self, stream: u32) {
        self.send(kind::HEADERS, flag::END_HEADERS, stream, &call()).unwrap();
    }

    /// Frames that were written, as text.
    fn told(&mut self) -> Vec<String> {
        let out = std::mem::take(self.machine.out());
        let mut rest = out.as_slice();
        let mut told = Vec::new();
        while let Some((head, after)) = rest.split_first_chunk::<HEAD>() {
            let head = Head::read(*head);
            let (payload, after) = after.split_at(head.length);
            rest = after;
            let number = payload.first_chunk().map(|it| u32::from_be_bytes(*it)).unwrap_or_default();
            told.push(match head.kind {
                kind::SETTINGS if head.has(flag::ACK) => "settings ack".to_owned(),
                kind::SETTINGS => "settings".to_owned(),
                kind::PING => format!("ping {}", head.flags),
                kind::RST_STREAM => format!("reset {} {number}", head.stream),
                kind::WINDOW_UPDATE => format!("window {} {number}", head.stream),
                kind::GOAWAY => format!("goaway {number} {}", payload[7]),
                kind::HEADERS => format!("headers {} {}", head.stream, head.flags),
                kind::DATA => format!("data {} {} {}", head.stream, head.length, head.flags),
                other => format!("kind {other}"),
            });
        }
        assert!(rest.is_empty());
        told
    }
}

fn response() -> http::response::Parts {
    http::Response::new(()).into_parts().0
}

fn reason(result: Result<(), Fault>) -> Reason {
    result.unwrap_err().reason
}

#[test]
fn a_call_is_taken_and_answered() {
    let mut client = Client::new();
    assert_eq!(client.told(), ["settings", "settings ack"]);
    client.open(1);
    client.send(kind::DATA, flag::END_STREAM, 1, b"question").unwrap();
    let [
        Event::Opened { stream: 1, request, ended: false },
        Event::Data { stream: 1, bytes },
        Event::Ended { stream: 1 },
    ] = client.events.as_slice()
    else {
        panic!("{:?}", client.events)
    };
    assert_eq!((request.uri().path(), bytes.as_ref()), ("/s/M", b"question".as_slice()));
    client.machine.respond(1, &response(), false);
    let mut answer = Bytes::from_static(b"answer");
    client.machine.data(1, &mut answer);
    client.machine.trailers(1, &http::HeaderMap::new());
    assert_eq!(client.told(), ["headers 1 4", "data 1 6 0", "headers 1 5"]);
    assert!(client.machine.streams.is_empty());
}

/// However the network cuts them, the same bytes mean the same, and nothing of them is kept.
#[test]
fn bytes_may_come_one_by_one() {
    let mut whole = Client::new();
    let mut block = call();
    let rest = block.split_off(7);
    let input = [
        bytes(kind::HEADERS, 0, 1, &block),
        bytes(kind::CONTINUATION, flag::END_HEADERS, 1, &rest),
        bytes(kind::DATA, flag::PADDED, 1, b"\x03text\0\0\0"),
        bytes(kind::PING, 0, 0, b"12345678"),
        bytes(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, &[]),
    ]
    .concat();
    whole.feed(&input).unwrap();
    let mut parted = Client::new();
    for byte in &input {
        parted.feed(&[*byte]).unwrap();
    }
    assert_eq!(format!("{:?}", whole.events), format!("{:?}", parted.events));
    assert_eq!(whole.events.len(), 3);
    assert_eq!(whole.told(), parted.told());
    assert_eq!((parted.machine.partial.capacity(), parted.machine.block.is_none()), (0, true));
}

#[test]
fn who_does_not_speak_the_protocol_is_told_so() {
    let mut machine = Machine::default();
    let fault = machine.feed(b"GET / HTTP/1.1\r\n", T0, &mut Vec::new()).unwrap_err();
    assert_eq!(fault.to_string(), "HTTP/2: this port speaks HTTP/2 (Protocol)");
    assert!(machine.out().ends_with(b"this port speaks HTTP/2"));
}

#[test]
fn what_breaks_the_protocol_ends_the_connection() {
    use kind::*;
    let oversize = {
        let mut head = bytes(DATA, 0, 1, &[]);
        head[..3].copy_from_slice(&[0, 0x40, 1]);
        head
    };
    let cases: [(&str, Vec<u8>, Reason); 26] = [
        ("data before its stream", bytes(DATA, 0, 1, b"x"), Reason::Protocol),
        ("data of no stream", bytes(DATA, 0, 0, b"x"), Reason::Protocol),
        ("a frame too large", oversize, Reason::FrameSize),
        ("headers of an even stream", bytes(HEADERS, flag::END_HEADERS, 2, &call()), Reason::Protocol),
        ("headers of no stream", bytes(HEADERS, flag::END_HEADERS, 0, &call()), Reason::Protocol),
        (
            "headers with half a priority",
            bytes(HEADERS, flag::END_HEADERS | flag::PRIORITY, 1, &[0; 4]),
            Reason::FrameSize,
        ),
        ("more padding than headers", bytes(HEADERS, flag::END_HEADERS | flag::PADDED, 1, &[9, 0]), Reason::Protocol),
        ("padding without a length", bytes(HEADERS, flag::END_HEADERS | flag::PADDED, 1, &[]), Reason::Protocol),
        ("fields that cannot be read", bytes(HEADERS, flag::END_HEADERS, 1, &[0x80]), Reason::Compression),
        (
            "a block that is not continued",
            [bytes(HEADERS, 0, 1, &[]), bytes(PING, 0, 0, &[0; 8])].concat(),
            Reason::Protocol,
        ),
        (
            "a block that is continued by another",
            [bytes(HEADERS, 0, 1, &[]), bytes(CONTINUATION, 0, 3, &[])].concat(),
            Reason::Protocol,
        ),
        (
            "a block without end",
            [
                bytes(HEADERS, 0, 1, &[0; PAYLOAD]),
                bytes(CONTINUATION, 0, 1, &[0; PAYLOAD]),
                bytes(CONTINUATION, 0, 1, &[0]),
            ]
            .concat(),
            Reason::EnhanceYourCalm,
        ),
        ("a continuation of nothing", bytes(CONTINUATION, 0, 1, &[]), Reason::Protocol),
        ("a reset before its stream", bytes(RST_STREAM, 0, 1, &[0; 4]), Reason::Protocol),
        ("settings of a stream", bytes(SETTINGS, 0, 1, &[]), Reason::Protocol),
        ("half a setting", bytes(SETTINGS, 0, 0, &[0; 5]), Reason::FrameSize),
        ("an acknowledgement with settings", bytes(SETTINGS, flag::ACK, 0, &[0; 6]), Reason::FrameSize),
        ("a bad push setting", bytes(SETTINGS, 0, 0, &[0, 2, 0, 0, 0, 2]), Reason::Protocol),
        ("a window too wide", bytes(SETTINGS, 0, 0, &[0, 4, 0x80, 0, 0, 0]), Reason::FlowControl),
        ("frames too small", bytes(SETTINGS, 0, 0, &[0, 5, 0, 0, 0x3f, 0xff]), Reason::Protocol),
        ("frames too large", bytes(SETTINGS, 0, 0, &[0, 5, 1, 0, 0, 0]), Reason::Protocol),
        ("a ping of a stream", bytes(PING, 0, 1, &[0; 8]), Reason::Protocol),
        ("half a ping", bytes(PING, 0, 0, &[0; 4]), Reason::FrameSize),
        ("a push", bytes(PUSH_PROMISE, 0, 1, &[0; 4]), Reason::Protocol),
        ("a window update of nothing", bytes(WINDOW_UPDATE, 0, 0, &[0; 4]), Reason::Protocol),
        ("a window beyond the widest", bytes(WINDOW_UPDATE, 0, 0, &[0x7f, 0xff, 0xff, 0xff]), Reason::FlowControl),
    ];
    for (name, input, wanted) in cases {
        let mut client = Client::new();
        client.told();
        assert_eq!(reason(client.feed(&input)), wanted, "{name}");
        assert_eq!(client.told().last().unwrap(), &format!("goaway 0 {}", wanted as u32), "{name}");
    }
    let mut early = Machine::default();
    let first = [PREFACE, &bytes(kind::PING, 0, 0, &[0; 8])].concat();
    assert_eq!(reason(early.feed(&first, T0, &mut Vec::new())), Reason::Protocol);
}

#[test]
fn what_breaks_one_call_ends_only_that() {
    let mut client = Client::new();
    client.open(1);
    client.told();
    // Too much of a request, none at all, and one too many.
    let mut large = call();
    hpack::put_field(&mut large, b"x", &[b'v'; fields::MAX_LIST]);
    let (first, second) = large.split_at(large.len() / 2);
    client.send(kind::HEADERS, 0, 3, first).unwrap();
    client.send(kind::CONTINUATION, flag::END_HEADERS, 3, second).unwrap();
    client.send(kind::HEADERS, flag::END_HEADERS, 5, &[0x83]).unwrap();
    for n in 0..u32::try_from(MAX_STREAMS).unwrap() {
        client.open(7 + 2 * n);
    }
    let told = client.told();
    assert_eq!(told, ["reset 3 11", "reset 5 1", "reset 37 7"]);
    // Data behind an end, trailers that are none, and a window of one stream.
    client.send(kind::DATA, flag::END_STREAM, 7, &[]).unwrap();
    client.send(kind::DATA, 0, 7, b"more").unwrap();
    client.send(kind::HEADERS, flag::END_HEADERS, 9, &[]).unwrap();
    client.send(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 11, &call()).unwrap();
    client.send(kind::WINDOW_UPDATE, 0, 13, &[0; 4]).unwrap();
    client.send(kind::WINDOW_UPDATE, 0, 15, &[0x7f, 0xff, 0xff, 0xff]).unwrap();
    assert_eq!(client.told(), ["reset 7 5", "reset 9 1", "reset 11 1", "reset 13 1", "reset 15 3"]);
    let resets: Vec<_> = client
        .events
        .iter()
        .filter_map(|it| if let Event::Reset { stream } = it { Some(*stream) } else { None })
        .collect();
    assert_eq!(resets, [7, 9, 11, 13, 15]);
    // The first one never noticed.
    client.send(kind::DATA, flag::END_STREAM, 1, b"still here").unwrap();
    assert!(matches!(client.events.last(), Some(Event::Ended { stream: 1 })));
}

#[test]
fn frames_of_streams_that_are_over_are_let_pass() {
    let mut client = Client::new();
    client.open(1);
    client.machine.respond(1, &response(), true);
    // Answered before everything was said: the client is told to stop, and what was on its way is dropped.
    assert_eq!(client.told()[2..], ["headers 1 5", "reset 1 0"]);
    client.events.clear();
    client.send(kind::DATA, 0, 1, b"on its way").unwrap();
    client.send(kind::WINDOW_UPDATE, 0, 1, &[0, 0, 0, 9]).unwrap();
    client.send(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, &[]).unwrap();
    client.send(kind::RST_STREAM, 0, 1, &[0; 4]).unwrap();
    client.send(kind::PRIORITY, 0, 1, &[0; 5]).unwrap();
    client.send(0x42, 0, 1, b"of the future").unwrap();
    assert!(client.events.is_empty() && client.told().is_empty());
}

#[test]
fn windows_are_kept_on_both_sides() {
    let mut client = Client::new();
    client.open(1);
    client.open(3);
    client.told();
    // Theirs: a stream may run full without holding up another.
    for _ in 0..3 {
        client.send(kind::DATA, 0, 1, &[0; PAYLOAD]).unwrap();
    }
    client.send(kind::DATA, 0, 1, &[0; 16_383]).unwrap();
    assert_eq!(client.told(), ["window 0 49152"]);
    client.send(kind::DATA, 0, 3, b"x").unwrap();
    client.send(kind::DATA, 0, 1, b"x").unwrap();
    assert_eq!(client.told(), ["reset 1 3"]);
    client.machine.was_read(3, PORTION - 1);
    assert!(client.told().is_empty());
    client.machine.was_read(3, 1);
    assert_eq!(client.told(), [format!("window 3 {PORTION}")]);
    // Ours: no more than stream and connection allow.
    let mut answer = Bytes::from(vec![1; 100_000]);
    client.machine.data(3, &mut answer);
    client.told();
    client.machine.data(3, &mut answer);
    assert_eq!((client.told().len(), answer.len()), (2, 100_000 - 65_535));
    client.machine.data(3, &mut answer);
    assert!(client.told().is_empty());
    client.send(kind::WINDOW_UPDATE, 0, 0, &[0, 0, 0, 10]).unwrap();
    client.machine.data(3, &mut answer);
    assert!(client.told().is_empty(), "the stream is full");
    client.send(kind::WINDOW_UPDATE, 0, 3, &[0, 0, 0, 20]).unwrap();
    client.machine.data(3, &mut answer);
    assert_eq!(client.told(), ["data 3 10 0"]);
    // Narrowed windows of the peer may be owed to it.
    client.send(kind::SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]).unwrap();
    client.send(kind::WINDOW_UPDATE, 0, 0, &[0, 0, 1, 0]).unwrap();
    client.machine.data(3, &mut answer);
    assert_eq!(client.told(), ["settings ack"]);
}

#[test]
fn fuss_is_borne_for_a_while() {
    let ping = bytes(kind::PING, 0, 0, &[0; 8]);
    let mut client = Client::new();
    let mut n = 0;
    let fault = loop {
        match client.feed(&ping) {
            Ok(()) => n += 1,
            Err(fault) => break fault,
        }
        client.told();
    };
    assert_eq!((fault.reason, n), (Reason::EnhanceYourCalm, Fuss::BURST - 1));
    // Spread over time it is no trouble, and calls that end are none either.
    let mut client = Client::new();
    for second in 0..100 {
        for _ in 0..Fuss::PER_SECOND {
            client.machine.feed(&ping, Duration::from_secs(second), &mut client.events).unwrap();
        }
        client.told();
    }
    // Calls that are begun and given up at once are.
    let mut client = Client::new();
    let mut given_up = 0;
    for n in 0.. {
        client.open(2 * n + 1);
        if client.send(kind::RST_STREAM, 0, 2 * n + 1, &[0; 4]).is_err() {
            break;
        }
        given_up += 1;
    }
    assert_eq!(given_up, Fuss::BURST - 1);
}

#[test]
fn who_leaves_takes_no_more_calls() {
    let mut client = Client::new();
    client.open(1);
    client.told();
    client.machine.leave();
    client.machine.leave();
    client.open(3);
    assert_eq!(client.told(), ["goaway 1 0"]);
    assert_eq!(client.events.len(), 1);
    client.machine.respond(1, &response(), false);
    client.machine.end(1);
    assert_eq!(client.told(), ["headers 1 4", "data 1 0 1", "reset 1 0"]);
}

proptest! {
    /// Whatever comes, and however it is cut: no panic, bounded memory, and after a fault a last word.
    #[test]
    fn nothing_that_comes_breaks_it(
        frames in prop::collection::vec((0_u8..11, any::<u8>(), 0_u32..9, prop::collection::vec(any::<u8>(), 0..80)), 0..60),
        cut in 1_usize..200,
        call_first in any::<bool>(),
    ) {
        let mut client = Client::new();
        if call_first {
            client.open(1);
        }
        let input: Vec<u8> =
            frames.iter().flat_map(|(kind, flags, stream, payload)| bytes(*kind, *flags, *stream, payload)).collect();
        for part in input.chunks(cut) {
            let fed = client.feed(part);
            let mut chunk = Bytes::from_static(&[7; 50]);
            client.machine.data(1, &mut chunk);
            prop_assert!(client.machine.streams.len() <= MAX_STREAMS);
            prop_assert!(client.machine.partial.len() < HEAD + PAYLOAD);
            if fed.is_err() {
                let goaway = client.told().into_iter().rfind(|it| it.starts_with("goaway"));
                prop_assert!(goaway.is_some());
                break;
            }
            client.told();
        }
    }

    /// Bytes that are no frames at all.
    #[test]
    fn noise_is_no_danger(noise in prop::collection::vec(any::<u8>(), 0..4000)) {
        let mut client = Client::new();
        let _ = client.feed(&noise);
        client.told();
    }
}
