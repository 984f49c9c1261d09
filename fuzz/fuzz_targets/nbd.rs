//! Fuzzes what a client sends to the NBD server. The first byte of the input chooses whether the rest
//! follows the greeting, follows a valid negotiation, or becomes requests with valid magic numbers.
#![no_main]

use std::collections::BTreeMap;
use std::sync::Arc;

use disk::{BLOCK, MemDisk};
use libfuzzer_sys::fuzz_target;
use nbd::{Export, NbdLimits, serve_connection};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex, split};

/// Size of the disk, in bytes.
const SIZE: u64 = 64 << 10;
/// Bytes of the input that become one request.
const REQUEST_INPUT: usize = 8;
const WRITE: u16 = 1;

fuzz_target!(|data: &[u8]| {
    let Some((choice, rest)) = data.split_first() else { return };
    let mut sent = match choice % 3 {
        0 => vec![0, 0, 0, choice % 4],
        _ => negotiation(),
    };
    match choice % 3 {
        2 => sent.extend(rest.chunks_exact(REQUEST_INPUT).flat_map(request)),
        _ => sent.extend(rest),
    }
    serve(&sent);
});

/// A negotiation of structured replies, `base:allocation` and the export with the empty name.
fn negotiation() -> Vec<u8> {
    let option = |kind: u32, data: &[u8]| {
        [b"IHAVEOPT", &kind.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
    };
    let query = [&[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 15], &b"base:allocation"[..]].concat();
    [vec![0, 0, 0, 3], option(8, &[]), option(10, &query), option(7, &[0; 6])].concat()
}

/// A request, with a payload if it is a write.
fn request(input: &[u8]) -> Vec<u8> {
    let kind = u16::from(input[0] % 9);
    let flags = u16::from(input[1]);
    let blocks = |low: u8, high: u8| u64::from(u16::from_le_bytes([low, high % 2])) * BLOCK;
    // Most ranges consist of blocks inside the disk.
    let offset = blocks(input[2], input[3]) + u64::from(input[4] == 1);
    let len = blocks(input[5], input[6]) as u32 + u32::from(input[7] == 1);
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend([input[2]; 8]);
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    if kind == WRITE {
        bytes.extend(vec![input[4]; len as usize]);
    }
    bytes
}

/// Serves a client that sends `bytes` and then closes its side of the connection. The server must end
/// the connection.
fn serve(bytes: &[u8]) {
    let export =
        Export { disk: Arc::new(MemDisk::new(SIZE)), is_read_only: false, description: "fuzz".into() };
    let exports = BTreeMap::from([(String::new(), export)]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime needs no descriptors").block_on(async {
        let (client, server) = duplex(16 << 10);
        let (mut reader, mut writer) = split(client);
        let limits = NbdLimits::default();
        let send = async {
            // The server may end the connection early.
            let _ = writer.write_all(bytes).await;
            let _ = writer.shutdown().await;
        };
        let receive = async {
            let mut replies = Vec::new();
            let _ = reader.read_to_end(&mut replies).await;
        };
        let _ = tokio::join!(serve_connection(server, &exports, &limits), send, receive);
    });
}
