//! Frames of HTTP/2 (RFC 9113, section 6): their heads, and how ours are written.

/// What a client says first.
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Bytes of a frame before its payload.
pub(super) const HEAD: usize = 9;

/// The largest payload anybody must take, and the largest we do take.
pub(super) const PAYLOAD: usize = 16_384;

/// The most a window may reach.
pub(super) const WIDEST: i64 = (1 << 31) - 1;

pub(super) mod kind {
    pub(crate) const DATA: u8 = 0;
    pub(crate) const HEADERS: u8 = 1;
    pub(crate) const PRIORITY: u8 = 2;
    pub(crate) const RST_STREAM: u8 = 3;
    pub(crate) const SETTINGS: u8 = 4;
    pub(crate) const PUSH_PROMISE: u8 = 5;
    pub(crate) const PING: u8 = 6;
    pub(crate) const GOAWAY: u8 = 7;
    pub(crate) const WINDOW_UPDATE: u8 = 8;
    pub(crate) const CONTINUATION: u8 = 9;
}

pub(super) mod flag {
    pub(crate) const ACK: u8 = 1;
    pub(crate) const END_STREAM: u8 = 1;
    pub(crate) const END_HEADERS: u8 = 4;
    pub(crate) const PADDED: u8 = 8;
    pub(crate) const PRIORITY: u8 = 0x20;
}

pub(super) mod setting {
    pub(crate) const HEADER_TABLE_SIZE: u16 = 1;
    pub(crate) const ENABLE_PUSH: u16 = 2;
    pub(crate) const MAX_CONCURRENT_STREAMS: u16 = 3;
    pub(crate) const INITIAL_WINDOW_SIZE: u16 = 4;
    pub(crate) const MAX_FRAME_SIZE: u16 = 5;
    pub(crate) const MAX_HEADER_LIST_SIZE: u16 = 6;
}

/// Why a stream or a connection ends (section 7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Reason {
    NoError = 0,
    Protocol = 1,
    Internal = 2,
    FlowControl = 3,
    StreamClosed = 5,
    FrameSize = 6,
    RefusedStream = 7,
    Compression = 9,
    EnhanceYourCalm = 11,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) length: usize,
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
}

impl Head {
    pub(super) fn read(bytes: [u8; HEAD]) -> Self {
        let [a, b, c, kind, flags, stream @ ..] = bytes;
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        // The highest bit is reserved, and means nothing.
        Self { length, kind, flags, stream: u32::from_be_bytes(stream) & 0x7fff_ffff }
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

pub(super) fn put(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    out.extend_from_slice(&length[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

pub(super) fn put_settings(out: &mut Vec<u8>, settings: &[(u16, u32)]) {
    let mut payload = Vec::with_capacity(6 * settings.len());
    for (name, value) in settings {
        payload.extend_from_slice(&name.to_be_bytes());
        payload.extend_from_slice(&value.to_be_bytes());
    }
    put(out, kind::SETTINGS, 0, 0, &payload);
}

pub(super) fn put_reset(out: &mut Vec<u8>, stream: u32, reason: Reason) {
    put(out, kind::RST_STREAM, 0, stream, &(reason as u32).to_be_bytes());
}

pub(super) fn put_window(out: &mut Vec<u8>, stream: u32, more: u32) {
    put(out, kind::WINDOW_UPDATE, 0, stream, &more.to_be_bytes());
}

pub(super) fn put_goaway(out: &mut Vec<u8>, last: u32, reason: Reason, text: &str) {
    let mut payload = Vec::with_capacity(8 + text.len());
    payload.extend_from_slice(&last.to_be_bytes());
    payload.extend_from_slice(&(reason as u32).to_be_bytes());
    payload.extend_from_slice(text.as_bytes());
    put(out, kind::GOAWAY, 0, 0, &payload);
}

/// A block of fields, in as many frames as the peer's limit wants.
pub(super) fn put_block(out: &mut Vec<u8>, stream: u32, block: &[u8], end_stream: bool, limit: usize) {
    let mut rest = block;
    let mut kind = kind::HEADERS;
    let mut flags = if end_stream { flag::END_STREAM } else { 0 };
    loop {
        let (part, after) = rest.split_at(rest.len().min(limit));
        rest = after;
        if rest.is_empty() {
            flags |= flag::END_HEADERS;
        }
        put(out, kind, flags, stream, part);
        if rest.is_empty() {
            return;
        }
        (kind, flags) = (kind::CONTINUATION, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_block_is_parted() {
        let mut out = Vec::new();
        put_block(&mut out, 5, &[7; 25], true, 10);
        let mut heads = Vec::new();
        let mut rest = out.as_slice();
        while let Some((head, after)) = rest.split_first_chunk::<HEAD>() {
            let head = Head::read(*head);
            rest = &after[head.length..];
            heads.push((head.kind, head.flags, head.stream, head.length));
        }
        assert_eq!(
            heads,
            [
                (kind::HEADERS, flag::END_STREAM, 5, 10),
                (kind::CONTINUATION, 0, 5, 10),
                (kind::CONTINUATION, flag::END_HEADERS, 5, 5)
            ]
        );
    }
}
