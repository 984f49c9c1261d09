//! Serves the front ends of one device, one connection after the other.

use std::rc::Rc;
use std::time::Duration;

use tokio::net::UnixListener;

use crate::device::{DeviceMachine, HeldDeviceEvent, MessageContent};
use crate::devices::Shared;
use crate::framing::Cutter;
use crate::held_device::HeldDevice;
use crate::protocol::SharedFd;
use crate::socket::{FdStream, ReceiveError, Sending};

/// Pause after a failed attempt to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections until the task is aborted. Further front ends wait in the backlog of the
/// listener while one is connected.
pub(crate) async fn serve(device: Rc<HeldDevice>, listener: UnixListener, shared: Rc<Shared>) {
    let mut failures = 0u64;
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => FdStream::new(stream),
            Err(e) => {
                // The cause, such as a lack of descriptors, may last for a while.
                tracing::warn!(device = device.name, "cannot accept a front end: {e}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let connection = shared.next_connection();
        step(&device, HeldDeviceEvent::Connected(connection), &shared);
        tracing::debug!(device = device.name, connection, "a front end has connected");
        let end = talk(&device, &stream, &shared).await;
        // Disconnect the front end first, then let the device forget it.
        drop(stream);
        step(&device, HeldDeviceEvent::Ended, &shared);
        match end {
            Ok(()) => tracing::debug!(device = device.name, connection, "the gateway closed the connection"),
            Err(ReceiveError::Closed) => {
                tracing::debug!(device = device.name, connection, "the front end has disconnected");
            }
            Err(e) => {
                failures += 1;
                // A front end that fails again and again must not fill the log.
                if failures.is_power_of_two() {
                    tracing::warn!(
                        device = device.name,
                        connection,
                        failures,
                        "a front end was disconnected: {e}"
                    );
                }
            }
        }
    }
}

/// Exchanges messages with a front end until the connection ends. Returns `Ok` if the gateway wants it
/// to end.
async fn talk(device: &Rc<HeldDevice>, stream: &FdStream, shared: &Shared) -> Result<(), ReceiveError> {
    let mut cutter = Cutter::new(device.framing);
    let mut sending: Option<Sending> = None;
    loop {
        if device.look(DeviceMachine::is_over) {
            return Ok(());
        }
        let reads = device.look(DeviceMachine::reads);
        if sending.is_none() {
            sending =
                device.look(DeviceMachine::outgoing).map(|content| Sending::new(content.bytes, content.fds));
        }
        let write = async {
            match &mut sending {
                Some(sending) => stream.send(sending).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            received = stream.receive(&mut cutter), if reads => {
                let message = received?;
                let fds = message.fds.into_iter().map(SharedFd::new).collect();
                step(device, HeldDeviceEvent::Received(MessageContent { bytes: message.bytes, fds }), shared);
            }
            // While the holder does not read, notice at least the end of the front end.
            closed = stream.closed(), if !reads => {
                closed?;
                return Err(ReceiveError::Closed);
            }
            written = write => {
                written?;
                sending = None;
                step(device, HeldDeviceEvent::Written, shared);
            }
            () = device.changed() => {}
        }
    }
}

/// Applies an event of the front end.
fn step(device: &Rc<HeldDevice>, event: HeldDeviceEvent, shared: &Shared) {
    device.step(event, &shared.news).expect("only calls of the gateway are refused");
}
