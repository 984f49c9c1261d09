//! Fuzzes the messages of a front end. The input is a sequence of messages, each with file
//! descriptors. After each message that the session accepts, the session is restored from its state.
#![no_main]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;

use libfuzzer_sys::fuzz_target;
use vhost::message::{FrontEndRequest, HEADER_LEN};
use vhost::{DeviceView, VhostSession};

/// Maximum number of messages in an input, and of file descriptors with a message.
const MESSAGES_MAX: usize = 32;
const FDS_MAX: usize = 9;

fuzz_target!(|data: &[u8]| {
    let _ = FrontEndRequest::read(data);
    let _ = VhostSession::restore(data, Vec::new());
    let mut session = VhostSession::new(2);
    let mut kept: BTreeMap<u64, OwnedFd> = BTreeMap::new();
    let mut rest = data;
    for _ in 0..MESSAGES_MAX {
        let Some((message, fds, after)) = next(rest) else { return };
        rest = after;
        let stopped = session.stops(&message).into_iter().map(|queue| (queue, 7)).collect();
        let view = DeviceView { size: 1 << 30, stopped };
        let fds = (0..fds).map(|_| file()).collect();
        let Ok(answer) = session.handle(&message, fds, &view) else { return };
        for (key, fd) in answer.keep {
            assert!(kept.insert(key, fd).is_none(), "a key is used once");
        }
        for key in answer.drop {
            assert!(kept.remove(&key).is_some(), "only kept file descriptors are dropped");
        }
        let fds = kept.iter().map(|(key, fd)| (*key, fd.try_clone().expect("a file descriptor is free")));
        let restored = VhostSession::restore(&answer.state, fds.collect());
        let restored = restored.expect("a session can be restored after each message");
        assert_eq!(format!("{restored:?}"), format!("{session:?}"));
    }
});

/// Takes the next message from the input: number of the request, number of file descriptors, length
/// and payload.
fn next(data: &[u8]) -> Option<(Vec<u8>, usize, &[u8])> {
    let ([request, fds, len], rest) = data.split_first_chunk()?;
    let (payload, rest) = rest.split_at_checked((*len).into())?;
    let header = [u32::from(*request), 1 | 8, payload.len() as u32];
    let mut message: Vec<u8> = header.into_iter().flat_map(u32::to_ne_bytes).collect();
    assert_eq!(message.len(), HEADER_LEN);
    message.extend(payload);
    Some((message, usize::from(*fds) % FDS_MAX, rest))
}

/// A file of 64 KiB that can be mapped.
fn file() -> OwnedFd {
    let file: File = tempfile::tempfile().expect("a temporary file can be created");
    file.set_len(64 << 10).expect("the file can be extended");
    file.into()
}
