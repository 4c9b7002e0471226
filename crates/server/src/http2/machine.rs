//! One connection as the protocol sees it: bytes in, events and bytes out. No clock, no socket, no task.
//!
//! Bounds, whatever the peer does: at most [`MAX_STREAMS`] streams, a window of unread bytes for each, one unfinished
//! frame, one unfinished block of fields. A peer that keeps us busy with nothing ([`Fuss`]) is sent away.

use std::time::Duration;

use bytes::{Buf as _, Bytes};

use super::{
    fields::{self, Fields},
    frame::{self, HEAD, Head, PAYLOAD, PREFACE, Reason, WIDEST, flag, kind, setting},
    hpack,
};

/// Calls a client may have open at once.
pub(super) const MAX_STREAMS: usize = 16;
/// How much of a stream a client may send before somebody reads it; the protocol's own first value.
pub(super) const WINDOW: u32 = 65_535;
/// What is read of a stream is told in portions of this size, not byte by byte.
pub(super) const PORTION: u32 = WINDOW / 2;
/// A block of fields, as it travels.
const MAX_BLOCK: usize = 32 * 1024;
/// No more is made while so much waits to be written.
pub(super) const ENOUGH: usize = 32 * 1024;

/// The connection is over, and was told so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("HTTP/2: {text} ({reason:?})")]
pub(super) struct Fault {
    pub(super) reason: Reason,
    pub(super) text: &'static str,
}

fn fault<T>(reason: Reason, text: &'static str) -> Result<T, Fault> {
    Err(Fault { reason, text })
}

#[derive(Debug)]
pub(super) enum Event {
    /// A call begins; `ended` if nothing follows.
    Opened {
        stream: u32,
        request: http::Request<()>,
        ended: bool,
    },
    Data {
        stream: u32,
        bytes: Bytes,
    },
    /// The client has said everything.
    Ended {
        stream: u32,
    },
    /// The stream is gone: the client gave it up, or did what it may not.
    Reset {
        stream: u32,
    },
}

#[derive(Debug, Default)]
pub(super) struct Machine {
    greeting: Greeting,
    /// The beginning of a frame whose end has not come.
    partial: Vec<u8>,
    /// The beginning of a block of fields: whose, whether its stream ends with it, and what there is of it.
    block: Option<(u32, bool, Vec<u8>)>,
    hpack: hpack::Decoder,
    streams: Vec<Stream>,
    /// The highest stream that was begun.
    last: u32,
    /// We take no more streams.
    leaving: bool,
    theirs: Theirs,
    /// What we may still send on the connection, and they.
    send: Send,
    left: Left,
    fuss: Fuss,
    out: Vec<u8>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Greeting {
    #[default]
    Preface,
    Settings,
    Done,
}

/// Bytes we may send; may be negative after the peer narrowed its windows.
#[derive(Debug, Clone, Copy)]
struct Send(i64);

/// Bytes the peer may send.
#[derive(Debug, Clone, Copy)]
struct Left(u32);

impl Default for Send {
    fn default() -> Self {
        Self(i64::from(WINDOW))
    }
}

impl Default for Left {
    fn default() -> Self {
        Self(WINDOW)
    }
}

impl Send {
    /// Widens, if it does not become wider than allowed.
    fn widen(&mut self, more: i64) -> Option<()> {
        self.0 = self.0.checked_add(more).filter(|wide| *wide <= WIDEST)?;
        Some(())
    }
}

/// What the peer set.
#[derive(Debug)]
struct Theirs {
    window: i64,
    payload: usize,
}

impl Default for Theirs {
    fn default() -> Self {
        Self { window: i64::from(WINDOW), payload: PAYLOAD }
    }
}

#[derive(Debug)]
struct Stream {
    id: u32,
    send: Send,
    left: Left,
    /// Read by our side and not yet told.
    owed: u32,
    /// The client may say more.
    open: bool,
}

/// Frames that cost us and say nothing: a thousand at once are borne, and a hundred a second.
#[derive(Debug, Default)]
struct Fuss {
    n: u32,
    counted_at: Duration,
}

impl Fuss {
    const BURST: u32 = 1000;
    const PER_SECOND: u32 = 100;

    fn more(&mut self, now: Duration) -> Result<(), Fault> {
        let seconds = u32::try_from(now.saturating_sub(self.counted_at).as_secs()).unwrap_or(u32::MAX);
        if 0 < seconds {
            self.n = self.n.saturating_sub(seconds.saturating_mul(Self::PER_SECOND));
            self.counted_at = now;
        }
        self.n += 1;
        if self.n <= Self::BURST { Ok(()) } else { fault(Reason::EnhanceYourCalm, "too many frames that say nothing") }
    }
}

/// What was read at once: when, and what it means.
struct Turn<'a> {
    now: Duration,
    events: &'a mut Vec<Event>,
}

impl Machine {
    /// Takes what came from the client. `now` counts from any fixed moment. After a fault nothing more may be fed;
    /// what is left to write says why.
    pub(super) fn feed(&mut self, input: &[u8], now: Duration, events: &mut Vec<Event>) -> Result<(), Fault> {
        let fed = self.take(input, &mut Turn { now, events });
        if let Err(fault) = fed {
            frame::put_goaway(&mut self.out, self.last, fault.reason, fault.text);
        }
        fed
    }

    fn take(&mut self, input: &[u8], turn: &mut Turn<'_>) -> Result<(), Fault> {
        if self.partial.is_empty() {
            let used = self.frames(input, turn)?;
            self.partial.extend_from_slice(&input[used..]);
        } else {
            self.partial.extend_from_slice(input);
            let mut whole = std::mem::take(&mut self.partial);
            let used = self.frames(&whole, turn)?;
            if used < whole.len() {
                whole.drain(..used);
                self.partial = whole;
            }
        }
        Ok(())
    }

    /// Takes the whole frames at the beginning of `input`, and says how long they are.
    fn frames(&mut self, input: &[u8], turn: &mut Turn<'_>) -> Result<usize, Fault> {
        let mut rest = input;
        if self.greeting == Greeting::Preface {
            let n = PREFACE.len().min(rest.len());
            if rest[..n] != PREFACE[..n] {
                return fault(Reason::Protocol, "this port speaks HTTP/2");
            }
            if n < PREFACE.len() {
                return Ok(0);
            }
            rest = &rest[n..];
            self.greeting = Greeting::Settings;
            frame::put_settings(
                &mut self.out,
                &[
                    (setting::HEADER_TABLE_SIZE, 0),
                    (setting::MAX_CONCURRENT_STREAMS, u32::try_from(MAX_STREAMS).unwrap_or(u32::MAX)),
                    (setting::MAX_HEADER_LIST_SIZE, u32::try_from(fields::MAX_LIST).unwrap_or(u32::MAX)),
                ],
            );
        }
        while let Some((head, after)) = rest.split_first_chunk::<HEAD>() {
            let head = Head::read(*head);
            if PAYLOAD < head.length {
                return fault(Reason::FrameSize, "frame is larger than 16384 bytes");
            }
            let Some((payload, after)) = after.split_at_checked(head.length) else { break };
            rest = after;
            self.frame(head, payload, turn)?;
        }
        Ok(input.len() - rest.len())
    }

    fn frame(&mut self, head: Head, payload: &[u8], turn: &mut Turn<'_>) -> Result<(), Fault> {
        if self.greeting == Greeting::Settings {
            if head.kind != kind::SETTINGS || head.has(flag::ACK) {
                return fault(Reason::Protocol, "settings come first");
            }
            self.greeting = Greeting::Done;
        }
        if let Some((stream, ..)) = &self.block
            && (head.kind != kind::CONTINUATION || head.stream != *stream)
        {
            return fault(Reason::Protocol, "a block of fields was not continued");
        }
        match head.kind {
            kind::DATA => self.data_came(head, payload, turn),
            kind::HEADERS => self.headers_came(head, payload, turn),
            kind::CONTINUATION => self.continuation_came(head, payload, turn),
            kind::RST_STREAM => {
                self.began(head.stream)?;
                if payload.len() != 4 {
                    return fault(Reason::FrameSize, "a reset has 4 bytes");
                }
                if self.forget(head.stream) {
                    turn.events.push(Event::Reset { stream: head.stream });
                }
                self.fuss.more(turn.now)
            }
            kind::SETTINGS => self.settings_came(head, payload, turn),
            kind::PING => {
                let (0, 8) = (head.stream, payload.len()) else {
                    return fault(if head.stream == 0 { Reason::FrameSize } else { Reason::Protocol }, "bad ping");
                };
                if head.has(flag::ACK) {
                    return Ok(());
                }
                frame::put(&mut self.out, kind::PING, flag::ACK, 0, payload);
                self.fuss.more(turn.now)
            }
            kind::WINDOW_UPDATE => self.window_came(head, payload, turn),
            kind::PUSH_PROMISE => fault(Reason::Protocol, "clients do not push"),
            kind::PRIORITY if head.stream == 0 => fault(Reason::Protocol, "a priority belongs to a stream"),
            kind::GOAWAY if head.stream != 0 => fault(Reason::Protocol, "a goaway belongs to no stream"),
            kind::GOAWAY if payload.len() < 8 => fault(Reason::FrameSize, "a goaway has 8 bytes or more"),
            // The client opens nothing more; what is open goes on. Of priorities and unknown frames we know nothing.
            _ => self.fuss.more(turn.now),
        }
    }

    /// A stream that was begun at some time; of another one nothing may come but its beginning.
    fn began(&self, id: u32) -> Result<(), Fault> {
        if id % 2 == 1 && id <= self.last {
            Ok(())
        } else {
            fault(Reason::Protocol, "frame of a stream that was not begun")
        }
    }

    fn stream(&mut self, id: u32) -> Option<&mut Stream> {
        self.streams.iter_mut().find(|it| it.id == id)
    }

    fn forget(&mut self, id: u32) -> bool {
        let before = self.streams.len();
        self.streams.retain(|it| it.id != id);
        self.streams.len() < before
    }

    /// Ends one stream that broke a rule; the others go on.
    fn refuse(&mut self, id: u32, reason: Reason, turn: &mut Turn<'_>) -> Result<(), Fault> {
        frame::put_reset(&mut self.out, id, reason);
        if self.forget(id) {
            turn.events.push(Event::Reset { stream: id });
        }
        self.fuss.more(turn.now)
    }

    fn data_came(&mut self, head: Head, payload: &[u8], turn: &mut Turn<'_>) -> Result<(), Fault> {
        self.began(head.stream)?;
        let id = head.stream;
        let data = unpadded(head, payload)?;
        let cost = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        // The connection's window is given back at once: the streams' windows bound what lies here unread, and one
        // that nobody reads must not hold up the others.
        self.left.0 =
            self.left.0.checked_sub(cost).ok_or(Fault { reason: Reason::FlowControl, text: "window overrun" })?;
        if self.left.0 < PORTION {
            frame::put_window(&mut self.out, 0, WINDOW - self.left.0);
            self.left = Left::default();
        }
        // It may be of a stream that we ended while it was on its way.
        let Some(stream) = self.stream(id) else { return self.fuss.more(turn.now) };
        if !stream.open {
            return self.refuse(id, Reason::StreamClosed, turn);
        }
        let Some(left) = stream.left.0.checked_sub(cost) else {
            return self.refuse(id, Reason::FlowControl, turn);
        };
        stream.left.0 = left;
        let ended = head.has(flag::END_STREAM);
        stream.open = !ended;
        if !data.is_empty() {
            turn.events.push(Event::Data { stream: id, bytes: Bytes::copy_from_slice(data) });
        }
        if ended {
            turn.events.push(Event::Ended { stream: id });
        }
        self.was_read(id, cost - u32::try_from(data.len()).unwrap_or(cost));
        if data.is_empty() && !ended { self.fuss.more(turn.now) } else { Ok(()) }
    }

    fn headers_came(&mut self, head: Head, payload: &[u8], turn: &mut Turn<'_>) -> Result<(), Fault> {
        if head.stream.is_multiple_of(2) {
            return fault(Reason::Protocol, "a client's streams have odd numbers");
        }
        let mut part = unpadded(head, payload)?;
        if head.has(flag::PRIORITY) {
            part = part.get(5..).ok_or(Fault { reason: Reason::FrameSize, text: "a priority has 5 bytes" })?;
        }
        let end_stream = head.has(flag::END_STREAM);
        if head.has(flag::END_HEADERS) {
            return self.block_came(head.stream, end_stream, part, turn);
        }
        self.block = Some((head.stream, end_stream, part.to_vec()));
        Ok(())
    }

    fn continuation_came(&mut self, head: Head, payload: &[u8], turn: &mut Turn<'_>) -> Result<(), Fault> {
        let Some((stream, end_stream, mut block)) = self.block.take() else {
            return fault(Reason::Protocol, "nothing is to be continued");
        };
        block.extend_from_slice(payload);
        if MAX_BLOCK < block.len() {
            return fault(Reason::EnhanceYourCalm, "a block of fields is larger than 32768 bytes");
        }
        if head.has(flag::END_HEADERS) {
            return self.block_came(stream, end_stream, &block, turn);
        }
        self.block = Some((stream, end_stream, block));
        // Without it, empty ones could come for ever.
        self.fuss.more(turn.now)
    }

    /// A whole block. It is read even if nobody wants it, for later ones may refer to it.
    fn block_came(&mut self, id: u32, end_stream: bool, block: &[u8], turn: &mut Turn<'_>) -> Result<(), Fault> {
        let mut fields = Fields::default();
        if self.hpack.decode(block, |name, value| fields.add(name, value)).is_err() {
            return fault(Reason::Compression, "a block of fields cannot be read");
        }
        if let Some(stream) = self.stream(id) {
            // Trailers, which say nothing to us but that it was all.
            if !stream.open {
                return self.refuse(id, Reason::StreamClosed, turn);
            }
            if !end_stream || !fields.are_trailers() {
                return self.refuse(id, Reason::Protocol, turn);
            }
            stream.open = false;
            turn.events.push(Event::Ended { stream: id });
            return Ok(());
        }
        if id <= self.last {
            // Trailers of a stream that we ended while they were on their way.
            return self.fuss.more(turn.now);
        }
        self.last = id;
        if self.leaving {
            return Ok(());
        }
        if MAX_STREAMS <= self.streams.len() {
            return self.refuse(id, Reason::RefusedStream, turn);
        }
        let request = match fields.into_request() {
            Ok(request) => request,
            Err(fields::Bad::Malformed) => return self.refuse(id, Reason::Protocol, turn),
            Err(fields::Bad::TooLarge) => return self.refuse(id, Reason::EnhanceYourCalm, turn),
        };
        self.streams.push(Stream {
            id,
            send: Send(self.theirs.window),
            left: Left::default(),
            owed: 0,
            open: !end_stream,
        });
        turn.events.push(Event::Opened { stream: id, request, ended: end_stream });
        Ok(())
    }

    fn settings_came(&mut self, head: Head, payload: &[u8], turn: &Turn<'_>) -> Result<(), Fault> {
        if head.stream != 0 {
            return fault(Reason::Protocol, "settings belong to no stream");
        }
        if head.has(flag::ACK) {
            return if payload.is_empty() { Ok(()) } else { fault(Reason::FrameSize, "an acknowledgement is empty") };
        }
        let (settings, rest) = payload.as_chunks::<6>();
        if !rest.is_empty() {
            return fault(Reason::FrameSize, "a setting has 6 bytes");
        }
        for [a, b, value @ ..] in settings {
            let value = u32::from_be_bytes(*value);
            match u16::from_be_bytes([*a, *b]) {
                setting::ENABLE_PUSH if 1 < value => return fault(Reason::Protocol, "bad setting of pushes"),
                setting::INITIAL_WINDOW_SIZE => {
                    let window = i64::from(value);
                    if WIDEST < window {
                        return fault(Reason::FlowControl, "window is wider than allowed");
                    }
                    let more = window - std::mem::replace(&mut self.theirs.window, window);
                    if self.streams.iter_mut().any(|it| it.send.widen(more).is_none()) {
                        return fault(Reason::FlowControl, "window is wider than allowed");
                    }
                }
                setting::MAX_FRAME_SIZE => {
                    let payload = usize::try_from(value).unwrap_or(usize::MAX);
                    if !(PAYLOAD..1 << 24).contains(&payload) {
                        return fault(Reason::Protocol, "bad setting of frame sizes");
                    }
                    // Larger ones are allowed to us, and of no use.
                    self.theirs.payload = PAYLOAD;
                }
                _ => {}
            }
        }
        frame::put(&mut self.out, kind::SETTINGS, flag::ACK, 0, &[]);
        self.fuss.more(turn.now)
    }

    fn window_came(&mut self, head: Head, payload: &[u8], turn: &mut Turn<'_>) -> Result<(), Fault> {
        let Ok(more) = <[u8; 4]>::try_from(payload) else {
            return fault(Reason::FrameSize, "a window update has 4 bytes");
        };
        let more = i64::from(u32::from_be_bytes(more) & 0x7fff_ffff);
        if head.stream == 0 {
            return match self.send.widen(more) {
                Some(()) if 0 < more => Ok(()),
                Some(()) => fault(Reason::Protocol, "a window update of nothing"),
                None => fault(Reason::FlowControl, "window is wider than allowed"),
            };
        }
        self.began(head.stream)?;
        let Some(stream) = self.stream(head.stream) else { return Ok(()) };
        match stream.send.widen(more) {
            Some(()) if 0 < more => Ok(()),
            Some(()) => self.refuse(head.stream, Reason::Protocol, turn),
            None => self.refuse(head.stream, Reason::FlowControl, turn),
        }
    }

    /// Our side has read `n` bytes of a stream: the client may send more.
    pub(super) fn was_read(&mut self, id: u32, n: u32) {
        let Some(stream) = self.stream(id).filter(|it| it.open) else { return };
        stream.owed += n;
        if PORTION <= stream.owed {
            let owed = std::mem::take(&mut stream.owed);
            stream.left.0 += owed;
            frame::put_window(&mut self.out, id, owed);
        }
    }

    /// Answers a call; `ended` if the answer has no body.
    pub(super) fn respond(&mut self, id: u32, parts: &http::response::Parts, ended: bool) {
        let mut block = Vec::with_capacity(256);
        hpack::put_status(&mut block, parts.status);
        self.put_fields(id, block, &parts.headers, ended);
    }

    /// Ends an answer with trailers.
    pub(super) fn trailers(&mut self, id: u32, trailers: &http::HeaderMap) {
        self.put_fields(id, Vec::with_capacity(64), trailers, true);
    }

    fn put_fields(&mut self, id: u32, mut block: Vec<u8>, fields: &http::HeaderMap, ended: bool) {
        if self.stream(id).is_none() {
            return;
        }
        for (name, value) in fields {
            if !fields::is_of_connection(name.as_str()) {
                hpack::put_field(&mut block, name.as_str().as_bytes(), value.as_bytes());
            }
        }
        frame::put_block(&mut self.out, id, &block, ended, self.theirs.payload);
        if ended {
            self.over(id);
        }
    }

    /// Sends of `chunk` what windows allow and what may wait to be written; the rest stays in it.
    pub(super) fn data(&mut self, id: u32, chunk: &mut Bytes) {
        while !chunk.is_empty() && self.out.len() < ENOUGH {
            let (all, payload) = (self.send.0, self.theirs.payload);
            let Some(stream) = self.stream(id) else { return chunk.clear() };
            let Ok(room) = usize::try_from(stream.send.0.min(all)) else { return };
            let n = chunk.len().min(room).min(payload);
            if n == 0 {
                return;
            }
            let sent = i64::try_from(n).unwrap_or(i64::MAX);
            stream.send.0 -= sent;
            self.send.0 -= sent;
            frame::put(&mut self.out, kind::DATA, 0, id, &chunk[..n]);
            chunk.advance(n);
        }
    }

    /// Ends an answer without trailers.
    pub(super) fn end(&mut self, id: u32) {
        if self.stream(id).is_some() {
            frame::put(&mut self.out, kind::DATA, flag::END_STREAM, id, &[]);
            self.over(id);
        }
    }

    /// Everything is said. A client that is not through is told that nobody listens.
    fn over(&mut self, id: u32) {
        if self.stream(id).is_some_and(|it| it.open) {
            frame::put_reset(&mut self.out, id, Reason::NoError);
        }
        self.forget(id);
    }

    /// Gives a call up.
    pub(super) fn reset(&mut self, id: u32, reason: Reason) {
        if self.forget(id) {
            frame::put_reset(&mut self.out, id, reason);
        }
    }

    /// Asks whether anybody is there.
    pub(super) fn ping(&mut self) {
        frame::put(&mut self.out, kind::PING, 0, 0, b"nstance?");
    }

    /// Says that no more calls are taken; those that run come to their end.
    pub(super) fn leave(&mut self) {
        if !std::mem::replace(&mut self.leaving, true) {
            frame::put_goaway(&mut self.out, self.last, Reason::NoError, "");
        }
    }

    /// What is to be written. Whoever has written it takes it away.
    pub(super) fn out(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }
}

/// The payload without its padding.
fn unpadded(head: Head, payload: &[u8]) -> Result<&[u8], Fault> {
    if !head.has(flag::PADDED) {
        return Ok(payload);
    }
    payload
        .split_first()
        .and_then(|(n, rest)| rest.get(..rest.len().checked_sub(usize::from(*n))?))
        .ok_or(Fault { reason: Reason::Protocol, text: "more padding than frame" })
}

#[cfg(test)]
mod tests;
