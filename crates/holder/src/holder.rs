//! The holder: accepts gateways, and runs until it is told to stop.

use std::cell::RefCell;
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;

use crate::devices::Devices;
use crate::error::{HolderError, SocketFileError};
use crate::gateway::{self, GatewayEnd};
use crate::socket::FdStream;
use crate::socket_file::{SocketFile, private_dir};

/// Permissions of the control socket.
const CONTROL_MODE: u32 = 0o600;
/// Pause after a failed attempt to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The limits of a holder. The memory of a device is limited to its state (1 MiB), 4 messages of its
/// front end (64 KiB each at most) and 4 messages to it (64 KiB each).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HolderLimits {
    /// Maximum number of devices.
    pub devices_max: usize,
    /// Maximum number of descriptors that the holder keeps for a device.
    pub kept_fds_max: usize,
}

impl Default for HolderLimits {
    /// 1024 devices. A device may keep 512 descriptors for memory, and two for each of 16 queues.
    fn default() -> HolderLimits {
        HolderLimits { devices_max: 1024, kept_fds_max: 512 + 2 * 16 }
    }
}

/// The configuration of a holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HolderConfig {
    /// Path of the control socket, at which the gateway connects. Its directory is created if it does
    /// not exist. Only this user may have access to the directory.
    pub control: PathBuf,
    /// Permissions of the sockets of devices, such as `0o600`.
    pub device_socket_mode: u32,
    /// The limits.
    pub limits: HolderLimits,
}

impl HolderConfig {
    /// Returns the configuration with default values.
    #[must_use]
    pub fn new(control: impl Into<PathBuf>) -> HolderConfig {
        HolderConfig { control: control.into(), device_socket_mode: 0o600, limits: HolderLimits::default() }
    }
}

/// Why a holder ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The future `stop` of [`Holder::run`] has completed.
    Asked,
    /// The gateway has stopped the holder.
    ByGateway,
}

type GatewayFuture = Pin<Box<dyn Future<Output = GatewayEnd>>>;
type GreetingFuture = Pin<Box<dyn Future<Output = Result<FdStream, String>>>>;

/// A holder that listens at its control socket. When it is dropped, it removes the files of its sockets
/// and disconnects all front ends.
#[derive(Debug)]
pub struct Holder {
    // Dropped in this order: the file before the listener.
    _file: SocketFile,
    control: UnixListener,
    devices: Rc<RefCell<Devices>>,
}

impl Holder {
    /// Listens at the control socket. Gateways can connect from now on; [`Holder::run`] serves them.
    /// Must be called in a tokio runtime.
    ///
    /// # Errors
    /// If the directory of the control socket is not private, if another holder listens, or if the
    /// operating system refuses the socket.
    pub fn bind(config: HolderConfig) -> Result<Holder, HolderError> {
        let path = config.control;
        let dir = path.parent().map(PathBuf::from).unwrap_or_default();
        match private_dir(&dir) {
            Ok(Ok(())) => {}
            Ok(Err((mode, owner))) => return Err(HolderError::Exposed { path: dir, mode, owner }),
            Err(source) => return Err(HolderError::Directory { path: dir, source }),
        }
        let (control, file) = SocketFile::listen(&path, CONTROL_MODE)?;
        let control = UnixListener::from_std(control).map_err(|e| SocketFileError::Failed {
            path: path.to_string_lossy().into_owned(),
            reason: e.to_string(),
        })?;
        let devices = Rc::new(RefCell::new(Devices::new(config.limits, config.device_socket_mode)));
        Ok(Holder { _file: file, control, devices })
    }

    /// Serves gateways and front ends until `stop` completes, or until a gateway stops the holder. Then
    /// the files of all sockets are removed. The caller passes the signals that end the process as
    /// `stop`.
    ///
    /// # Panics
    /// If the caller does not run in a `LocalSet`.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Stopped {
        let mut stop = std::pin::pin!(stop);
        let mut greeting: Option<GreetingFuture> = None;
        let mut gateway: Option<(GatewayFuture, Rc<Notify>)> = None;
        loop {
            let end = tokio::select! {
                biased;
                () = &mut stop => return Stopped::Asked,
                end = ready(gateway.as_mut().map(|(gateway, _)| gateway)) => {
                    gateway = None;
                    end
                }
                greeted = ready(greeting.as_mut()) => {
                    greeting = None;
                    let Some(stream) = admit(greeted) else { continue };
                    let end = match gateway.take() {
                        Some((old, replaced)) => {
                            replaced.notify_one();
                            // The connection ends at once.
                            Some(old.await)
                        }
                        None => None,
                    };
                    if !matches!(end, Some(GatewayEnd::Stopped)) {
                        self.devices.borrow().gateway_lost();
                        let replaced = Rc::new(Notify::new());
                        let serve = gateway::serve(stream, self.devices.clone(), replaced.clone());
                        gateway = Some((Box::pin(serve), replaced));
                        tracing::info!("a gateway has connected");
                    }
                    let Some(end) = end else { continue };
                    end
                }
                stream = accept(&self.control) => {
                    // A process that does not say hello gives way to the next.
                    greeting = Some(Box::pin(gateway::greet(stream)));
                    continue;
                }
            };
            match end {
                GatewayEnd::Stopped => return Stopped::ByGateway,
                GatewayEnd::Replaced => tracing::info!("a newer gateway has replaced the gateway"),
                GatewayEnd::Lost(reason) => {
                    tracing::info!("the connection of the gateway ended: {reason}");
                    self.devices.borrow().gateway_lost();
                }
            }
        }
    }
}

/// Accepts the next connection.
async fn accept(control: &UnixListener) -> UnixStream {
    loop {
        match control.accept().await {
            Ok((stream, _)) => return stream,
            Err(e) => {
                // The cause, such as a lack of descriptors, may last for a while.
                tracing::warn!("cannot accept a gateway: {e}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Waits for the future, or forever if there is none.
async fn ready<F: Future + Unpin>(future: Option<F>) -> F::Output {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

fn admit(greeted: Result<FdStream, String>) -> Option<FdStream> {
    match greeted {
        Ok(stream) => Some(stream),
        Err(reason) => {
            tracing::warn!("a process cannot become the gateway: {reason}");
            None
        }
    }
}
