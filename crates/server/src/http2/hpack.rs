//! HPACK (RFC 7541): reading what clients send, and writing without state.
//!
//! We ask clients not to use the dynamic table (`SETTINGS_HEADER_TABLE_SIZE` 0), for its entries would be kept as long as
//! their connection; until they have read that they may, so it is understood. What we write refers to nothing.

use std::collections::VecDeque;

use super::huffman;

/// The largest table a client may fill: that of a client that has not read our settings yet.
const LARGEST: usize = 4096;
/// What each entry counts besides its bytes.
const OVERHEAD: usize = 32;

/// The block cannot be read, and with it no later one of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unreadable;

/// A name and its value.
type Entry = (Box<[u8]>, Box<[u8]>);

#[derive(Debug)]
pub(super) struct Decoder {
    /// Newest first.
    entries: VecDeque<Entry>,
    size: usize,
    limit: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self { entries: VecDeque::new(), size: 0, limit: LARGEST }
    }
}

impl Decoder {
    /// Reads a whole block and hands out its fields, in order.
    pub(super) fn decode(&mut self, block: &[u8], mut field: impl FnMut(&[u8], &[u8])) -> Result<(), Unreadable> {
        let mut rest = block;
        let (mut name, mut value) = (Vec::new(), Vec::new());
        let mut n_fields = 0_usize;
        while let Some(&first) = rest.first() {
            if first & 0xe0 == 0x20 {
                // Sizes change between blocks, not within one.
                let limit = integer(&mut rest, 5)?;
                if 0 < n_fields || LARGEST < limit {
                    return Err(Unreadable);
                }
                self.limit = limit;
                self.shrink(limit);
                continue;
            }
            n_fields += 1;
            if first & 0x80 != 0 {
                let index = integer(&mut rest, 7)?;
                let (name, value) = self.entry(index)?;
                field(name, value);
                continue;
            }
            let keep = first & 0x40 != 0;
            let index = integer(&mut rest, if keep { 6 } else { 4 })?;
            name.clear();
            match index {
                0 => string(&mut rest, &mut name)?,
                _ => name.extend_from_slice(self.entry(index)?.0),
            }
            value.clear();
            string(&mut rest, &mut value)?;
            field(&name, &value);
            if keep {
                self.keep(&name, &value);
            }
        }
        Ok(())
    }

    fn entry(&self, index: usize) -> Result<(&[u8], &[u8]), Unreadable> {
        let index = index.checked_sub(1).ok_or(Unreadable)?;
        if let Some((name, value)) = STATIC.get(index) {
            return Ok((name.as_bytes(), value.as_bytes()));
        }
        let (name, value) = self.entries.get(index - STATIC.len()).ok_or(Unreadable)?;
        Ok((name, value))
    }

    fn keep(&mut self, name: &[u8], value: &[u8]) {
        let size = name.len() + value.len() + OVERHEAD;
        self.shrink(self.limit.saturating_sub(size));
        // One that does not fit empties the table, which is no mistake.
        if size <= self.limit {
            self.entries.push_front((name.into(), value.into()));
            self.size += size;
        }
    }

    fn shrink(&mut self, limit: usize) {
        while limit < self.size {
            let Some((name, value)) = self.entries.pop_back() else { break };
            self.size -= name.len() + value.len() + OVERHEAD;
        }
        if self.entries.is_empty() {
            self.entries = VecDeque::new();
        }
    }
}

/// An integer whose first bits share a byte with something else. None that we take is larger than a block.
fn integer(rest: &mut &[u8], prefix: u32) -> Result<usize, Unreadable> {
    let (first, mut tail) = rest.split_first().ok_or(Unreadable)?;
    let mask = (1_u8 << prefix) - 1;
    let mut value = usize::from(first & mask);
    if value == usize::from(mask) {
        for shift in [0, 7, 14, 21] {
            let (byte, after) = tail.split_first().ok_or(Unreadable)?;
            tail = after;
            value += usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                *rest = tail;
                return Ok(value);
            }
        }
        return Err(Unreadable);
    }
    *rest = tail;
    Ok(value)
}

fn string(rest: &mut &[u8], text: &mut Vec<u8>) -> Result<(), Unreadable> {
    let coded = rest.first().ok_or(Unreadable)? & 0x80 != 0;
    let length = integer(rest, 7)?;
    let (bytes, tail) = rest.split_at_checked(length).ok_or(Unreadable)?;
    *rest = tail;
    if coded {
        huffman::decode(bytes, text).map_err(|huffman::NotText| Unreadable)
    } else {
        text.extend_from_slice(bytes);
        Ok(())
    }
}

/// Writes a status as the first field of a block.
pub(super) fn put_status(block: &mut Vec<u8>, status: http::StatusCode) {
    match status.as_u16() {
        200 => block.push(0x88),
        _ => put_field(block, b":status", status.as_str().as_bytes()),
    }
}

/// Writes a field that nobody is to remember.
pub(super) fn put_field(block: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    block.push(0);
    for text in [name, value] {
        put_length(block, text.len());
        block.extend_from_slice(text);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "what is cut off is written before or after")]
fn put_length(block: &mut Vec<u8>, length: usize) {
    if length < 0x7f {
        block.push(length as u8);
        return;
    }
    block.push(0x7f);
    let mut rest = length - 0x7f;
    while 0x80 <= rest {
        block.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    block.push(rest as u8);
}

/// Appendix A.
const STATIC: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        data_encoding::HEXLOWER.decode(text.as_bytes()).unwrap()
    }

    fn read(decoder: &mut Decoder, block: &[u8]) -> Result<Vec<String>, Unreadable> {
        let mut fields = Vec::new();
        decoder
            .decode(block, |name, value| {
                fields.push(format!("{}={}", String::from_utf8_lossy(name), String::from_utf8_lossy(value)));
            })
            .map(|()| fields)
    }

    /// Appendix C.3 and C.4: three requests on one connection, plain and in Huffman's code.
    #[test]
    fn requests_of_the_standard_are_read() {
        let wanted = [
            vec![":method=GET", ":scheme=http", ":path=/", ":authority=www.example.com"],
            vec![":method=GET", ":scheme=http", ":path=/", ":authority=www.example.com", "cache-control=no-cache"],
            vec![
                ":method=GET",
                ":scheme=https",
                ":path=/index.html",
                ":authority=www.example.com",
                "custom-key=custom-value",
            ],
        ];
        let plain = [
            "828684410f7777772e6578616d706c652e636f6d",
            "828684be58086e6f2d6361636865",
            "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
        ];
        let coded = [
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            "828684be5886a8eb10649cbf",
            "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        ];
        for blocks in [plain, coded] {
            let mut decoder = Decoder::default();
            for (block, wanted) in blocks.iter().zip(&wanted) {
                assert_eq!(read(&mut decoder, &hex(block)).unwrap(), *wanted);
            }
            assert_eq!((decoder.entries.len(), decoder.size), (3, 164));
        }
    }

    #[test]
    fn a_table_of_no_size_keeps_nothing() {
        let mut decoder = Decoder::default();
        read(&mut decoder, &hex("828684410f7777772e6578616d706c652e636f6d")).unwrap();
        let fields = read(&mut decoder, &hex("20828684410f7777772e6578616d706c652e636f6d")).unwrap();
        assert_eq!(fields.len(), 4);
        assert_eq!((decoder.entries.len(), decoder.entries.capacity(), decoder.size), (0, 0, 0));
        assert_eq!(read(&mut decoder, &hex("be")), Err(Unreadable));
    }

    #[test]
    fn what_no_longer_fits_is_forgotten() {
        let mut decoder = Decoder::default();
        let mut block = Vec::new();
        for n in 0..200 {
            block.push(0x40);
            for text in [format!("name-{n}"), "v".repeat(40)] {
                put_length(&mut block, text.len());
                block.extend_from_slice(text.as_bytes());
            }
        }
        read(&mut decoder, &block).unwrap();
        assert!(decoder.size <= LARGEST && LARGEST < decoder.size + 100, "{}", decoder.size);
        assert_eq!(read(&mut decoder, &hex("be")).unwrap(), [format!("name-199={}", "v".repeat(40))]);
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        for block in [
            "80",           // index 0
            "ff00",         // index 127, which nobody stored
            "ffffffffffff", // an integer without end
            "3fffffff7f",   // a table larger than any
            "8220",         // a size after a field
            "4003",         // a name that is not there
            "400161",       // a value that is not there
            "4001618100",   // filling that is not all ones
            "3f",           // a size that is not there
        ] {
            assert_eq!(read(&mut Decoder::default(), &hex(block)), Err(Unreadable), "{block}");
        }
    }

    proptest! {
        #[test]
        fn nothing_that_comes_breaks_it(blocks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..8)) {
            let mut decoder = Decoder::default();
            for block in blocks {
                let _ = decoder.decode(&block, |_, _| ());
                prop_assert!(decoder.size <= LARGEST);
                let size: usize = decoder.entries.iter().map(|(name, value)| name.len() + value.len() + OVERHEAD).sum();
                prop_assert_eq!(size, decoder.size);
            }
        }

        #[test]
        fn what_is_written_is_read(fields in prop::collection::vec(("[a-z-]{1,40}", ".{0,300}"), 0..20)) {
            let mut block = Vec::new();
            put_status(&mut block, http::StatusCode::OK);
            put_status(&mut block, http::StatusCode::IM_A_TEAPOT);
            for (name, value) in &fields {
                put_field(&mut block, name.as_bytes(), value.as_bytes());
            }
            let wanted: Vec<_> = [":status=200".to_owned(), ":status=418".to_owned()]
                .into_iter()
                .chain(fields.iter().map(|(name, value)| format!("{name}={value}")))
                .collect();
            prop_assert_eq!(read(&mut Decoder::default(), &block).unwrap(), wanted);
        }
    }
}
