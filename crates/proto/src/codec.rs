//! How messages are written to the wire: as prost does it, with buffers that fit them.
//!
//! Every stream keeps a buffer for as long as it is open. The library's take 8 KiB each; three streams of ten thousand
//! agents that are silent most of the time would hold a quarter of a gigabyte for nothing. A buffer grows with a message
//! that needs more, and shrinks back to this with the next.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// Most reports and requests fit.
const SIZE: usize = 512;
/// What is gathered of a stream's messages before it is handed on.
const GATHER: usize = 4096;

#[derive(Debug, Clone)]
pub struct Thrifty<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Thrifty<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for Thrifty<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(SIZE, GATHER))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(SIZE, GATHER))
    }
}
