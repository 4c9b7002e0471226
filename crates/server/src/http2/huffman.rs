//! The Huffman code of HPACK (RFC 7541, appendix B), for reading only.
//!
//! The code is canonical: within a length, codes count upwards, and a longer length goes on where the shorter one ended.
//! So the symbols of each length, in their order, are the whole table.

/// Bits of a code, and the symbols whose codes have so many.
const CLASSES: [(usize, &[u8]); 21] = [
    (5, b"012aceiost"),
    (6, b" %-./3456789=A_bdfghlmnpru"),
    (7, b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, b"&*,;XZ"),
    (10, b"!\"()?"),
    (11, b"'+|"),
    (12, b"#>"),
    (13, b"\0$@[]~"),
    (14, b"^}"),
    (15, b"<`{"),
    (19, &[92, 195, 208]),
    (20, &[128, 130, 131, 162, 184, 194, 224, 226]),
    (21, &[153, 161, 167, 172, 176, 177, 179, 209, 216, 217, 227, 229, 230]),
    (
        22,
        &[
            129, 132, 133, 134, 136, 146, 154, 156, 160, 163, 164, 169, 170, 173, 178, 181, 185, 186, 187, 189, 190,
            196, 198, 228, 232, 233,
        ],
    ),
    (
        23,
        &[
            1, 135, 137, 138, 139, 140, 141, 143, 147, 149, 150, 151, 152, 155, 157, 158, 165, 166, 168, 174, 175, 180,
            182, 183, 188, 191, 197, 231, 239,
        ],
    ),
    (24, &[9, 142, 144, 145, 148, 159, 171, 206, 215, 225, 236, 237]),
    (25, &[199, 207, 234, 235]),
    (26, &[192, 193, 200, 201, 202, 205, 210, 213, 218, 219, 238, 240, 242, 243, 255]),
    (27, &[203, 204, 211, 212, 214, 221, 222, 223, 241, 244, 245, 246, 247, 248, 250, 251, 252, 253, 254]),
    (
        28,
        &[
            2, 3, 4, 5, 6, 7, 8, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 23, 24, 25, 26, 27, 28, 29, 30, 31, 127, 220,
            249,
        ],
    ),
    (30, &[10, 13, 22]),
];

const LONGEST: usize = 30;

/// By length: the first code, and the symbols from there on.
const CODES: [(usize, &[u8]); LONGEST + 1] = {
    let mut codes: [(usize, &[u8]); LONGEST + 1] = [(0, &[]); LONGEST + 1];
    let (mut next, mut bits, mut class) = (0, 0, 0);
    while class < CLASSES.len() {
        let (length, symbols) = CLASSES[class];
        next <<= length - bits;
        bits = length;
        codes[length] = (next, symbols);
        next += symbols.len();
        class += 1;
    }
    codes
};

/// Bits that are no text in this code, or that end amid a symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotText;

/// Reads `input` to the end of `text`. What follows the last symbol must be the beginning of the end mark, all ones,
/// and less than a byte.
pub(super) fn decode(input: &[u8], text: &mut Vec<u8>) -> Result<(), NotText> {
    let (mut code, mut bits) = (0_usize, 0_usize);
    for byte in input {
        for shift in (0..8).rev() {
            code = code << 1 | usize::from(byte >> shift & 1);
            bits += 1;
            let (first, symbols) = CODES[bits];
            let symbol = code.checked_sub(first).and_then(|at| symbols.get(at));
            match symbol {
                Some(symbol) => {
                    text.push(*symbol);
                    (code, bits) = (0, 0);
                }
                // No code is longer; what is left of thirty bits is the end mark, which nobody may send.
                None if bits == LONGEST => return Err(NotText),
                None => {}
            }
        }
    }
    if bits < 8 && code == (1 << bits) - 1 { Ok(()) } else { Err(NotText) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(input: &[u8]) -> Result<Vec<u8>, NotText> {
        let mut text = Vec::new();
        decode(input, &mut text).map(|()| text)
    }

    /// The code of one symbol, left-aligned, filled up with ones.
    fn encode(symbol: u8) -> Vec<u8> {
        let (bits, code) = CODES
            .iter()
            .enumerate()
            .find_map(|(bits, (first, symbols))| {
                let at = symbols.iter().position(|it| *it == symbol)?;
                Some((bits, first + at))
            })
            .unwrap();
        let filled = ((code as u64) << (64 - bits)) | (u64::MAX >> bits);
        filled.to_be_bytes()[..bits.div_ceil(8)].to_vec()
    }

    #[test]
    fn every_byte_has_one_code() {
        for symbol in 0..=u8::MAX {
            assert_eq!(read(&encode(symbol)), Ok(vec![symbol]), "{symbol}");
        }
        // All codes together with the end mark fill the space of codes: none is missing, none is there twice.
        let filled: u64 = CODES.iter().enumerate().map(|(bits, it)| (it.1.len() as u64) << (LONGEST - bits)).sum();
        assert_eq!(filled + 1, 1 << LONGEST);
    }

    #[test]
    fn texts_of_the_standard_are_read() {
        assert_eq!(
            read(&[0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff]).unwrap(),
            b"www.example.com"
        );
        assert_eq!(read(&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf]).unwrap(), b"no-cache");
        assert_eq!(read(&[0x64, 0x02]).unwrap(), b"302");
        assert_eq!(read(&[]).unwrap(), b"");
    }

    #[test]
    fn bad_ends_are_refused() {
        // A whole byte of filling, filling with a zero in it, and the end mark itself.
        assert_eq!(read(&[0x64, 0x02, 0xff]), Err(NotText));
        assert_eq!(read(&[0b0000_0000]), Err(NotText));
        assert_eq!(read(&[0xff, 0xff, 0xff, 0xff]), Err(NotText));
    }
}
