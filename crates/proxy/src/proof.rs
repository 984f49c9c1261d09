//! Proof of both ends of a control connection over TCP, before the hello.
//!
//! The bytes of a TLS 1.3 handshake travel in records of a length (2 bytes, big-endian) and a body.
//! After the handshake, the store tells the osd in one encrypted record whether it accepts the key.
//! What follows is not encrypted.
//!
//! ```text
//!   osd                              store
//!    | ClientHello                    |
//!    |------------------------------->|
//!    | ServerHello … Finished         |
//!    |<-------------------------------|
//!    | Certificate … Finished         |
//!    |------------------------------->|  the osd's key is accepted, or not
//!    | verdict: empty, or the reason  |
//!    |<-------------------------------|
//!    | hello                          |
//! ```

use std::io;

use identity::{Handshake, IdentityError, MAX_HANDSHAKE_BYTES, Protocol, Trust};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// First byte of the verdict if the store accepts the osd. Otherwise the verdict is the reason.
const ACCEPTED: &[u8] = b"\0";

/// Proves the identity of the osd, and checks that of the store.
///
/// # Errors
/// If the store is another one than `trust` expects, or does not accept this osd.
pub(crate) async fn prove_to_store(stream: &mut TcpStream, trust: &Trust) -> io::Result<()> {
    let mut handshake = Handshake::client(trust, Protocol::Channel).map_err(refused)?;
    while handshake.peer().is_none() {
        send(stream, &mut handshake).await?;
        receive(stream, &mut handshake).await?;
    }
    send(stream, &mut handshake).await?;
    let mut verdict = handshake.read();
    while verdict.is_empty() {
        receive(stream, &mut handshake).await?;
        verdict = handshake.read();
    }
    if verdict == ACCEPTED {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, String::from_utf8_lossy(&verdict).into_owned()))
}

/// Proves the identity of the store, and checks that of the osd.
///
/// # Errors
/// If the peer does not prove its key, or the store does not accept the key.
pub(crate) async fn prove_to_osd(stream: &mut TcpStream, trust: &Trust) -> io::Result<()> {
    let mut handshake = Handshake::server(trust, Protocol::Channel).map_err(refused)?;
    let key = loop {
        receive(stream, &mut handshake).await?;
        match handshake.peer() {
            Some(key) => break key,
            None => send(stream, &mut handshake).await?,
        }
    };
    if trust.user_of(&key).is_some() {
        handshake.write(ACCEPTED);
        return send(stream, &mut handshake).await;
    }
    let why = format!(
        "the store does not accept the osd's key {key}; copy the file keys/osd from the osd's machine to the store's \
         directory"
    );
    handshake.write(why.as_bytes());
    send(stream, &mut handshake).await?;
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// Sends what the handshake has for the peer.
async fn send(stream: &mut TcpStream, handshake: &mut Handshake) -> io::Result<()> {
    let bytes = handshake.output();
    if bytes.is_empty() {
        return Ok(());
    }
    let length = u16::try_from(bytes.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    let record = [&length.to_be_bytes()[..], &bytes].concat();
    stream.write_all(&record).await
}

/// Receives a record.
async fn receive(stream: &mut TcpStream, handshake: &mut Handshake) -> io::Result<()> {
    let length = usize::from(stream.read_u16().await?);
    if length == 0 || length > MAX_HANDSHAKE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a record of the handshake is too long"));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    if let Err(e) = handshake.input(&bytes) {
        // The peer learns the reason from the alert, if it can be sent.
        let _ = send(stream, handshake).await;
        return Err(refused(e));
    }
    Ok(())
}

fn refused(e: IdentityError) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, e.to_string())
}
