//! The devices of a holder: executes the calls of the gateway.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;

use base::thread::ThreadClass;
use rustix::process::{Resource, getrlimit};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;

use crate::device::{DeviceLimits, DeviceMachine, HeldDeviceEvent, MessageContent, UNANSWERED_MAX};
use crate::error::{HolderRefusal, SocketFileError};
use crate::framing::Framing;
use crate::front_end;
use crate::held_device::{HeldDevice, NewsQueue};
use crate::holder::HolderLimits;
use crate::protocol::{BadFrame, CALL_FDS_MAX, HeldChange, HolderCall, OUTBOX_MAX, SharedFd};
use crate::socket_file::SocketFile;

/// Descriptors of the process that are not for devices: the frame that is being read, the control
/// socket, the event loop, logs.
const OWN_FDS: u64 = CALL_FDS_MAX as u64 + 64;

/// What the tasks of all devices share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// The devices with news for the gateway.
    pub news: NewsQueue,
    /// Number of the newest connection of any device.
    newest_connection: Cell<u64>,
}

impl Shared {
    /// Returns the number of a new connection. The first number is 1.
    pub fn next_connection(&self) -> u64 {
        self.newest_connection.set(self.newest_connection.get() + 1);
        self.newest_connection.get()
    }
}

/// A task that ends with its owner.
#[derive(Debug)]
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A device with its socket. The fields are dropped in this order: the file before the listener, which
/// the task owns.
#[derive(Debug)]
struct Entry {
    file: SocketFile,
    device: Rc<HeldDevice>,
    /// Descriptors that the device may need.
    fds: u64,
    _task: Task,
}

/// All devices of a holder.
#[derive(Debug)]
pub(crate) struct Devices {
    limits: HolderLimits,
    socket_mode: u32,
    entries: BTreeMap<String, Entry>,
    shared: Rc<Shared>,
}

impl Devices {
    pub fn new(limits: HolderLimits, socket_mode: u32) -> Devices {
        Devices { limits, socket_mode, entries: BTreeMap::new(), shared: Rc::default() }
    }

    pub fn shared(&self) -> &Rc<Shared> {
        &self.shared
    }

    /// Returns the devices in the order of their names.
    pub fn all(&self) -> impl Iterator<Item = &Rc<HeldDevice>> {
        self.entries.values().map(|entry| &entry.device)
    }

    /// Executes a call of the gateway, with the descriptors of its frame.
    ///
    /// # Errors
    /// If the call states another number of descriptors.
    pub fn execute(
        &mut self,
        call: HolderCall,
        fds: Vec<OwnedFd>,
    ) -> Result<Result<(), HolderRefusal>, BadFrame> {
        let mut fds: Vec<SharedFd> = fds.into_iter().map(SharedFd::new).collect();
        let (stated, takes_rest) = match &call {
            HolderCall::Add { .. } | HolderCall::Remove { .. } | HolderCall::Stop => (0, false),
            HolderCall::Done { change, reply, .. } => (change.keep.len(), reply.is_some()),
            HolderCall::Deposit(change) => (change.keep.len(), false),
            HolderCall::Send { .. } => (0, true),
        };
        if fds.len() < stated || (fds.len() > stated && !takes_rest) {
            return Err(BadFrame::Fds { stated, arrived: fds.len() });
        }
        if let Err(refusal) = call.check() {
            return Ok(Err(refusal));
        }
        let rest = fds.split_off(stated);
        Ok(match call {
            HolderCall::Add { device, path, framing } => self.add(device, path, framing),
            HolderCall::Remove { device } => self.remove(&device),
            HolderCall::Done { number, change, reply, close } => {
                let reply = reply.map(|bytes| MessageContent { bytes, fds: rest });
                self.change(change, |change| HeldDeviceEvent::Done {
                    number,
                    change,
                    kept: fds,
                    reply,
                    close,
                })
            }
            HolderCall::Deposit(change) => {
                self.change(change, |change| HeldDeviceEvent::Deposit { change, kept: fds })
            }
            HolderCall::Send { device, connection, bytes } => {
                let event =
                    HeldDeviceEvent::Send { connection, content: MessageContent { bytes, fds: rest } };
                self.device(&device).and_then(|device| device.step(event, &self.shared.news))
            }
            HolderCall::Stop => Ok(()),
        })
    }

    /// Applies the acknowledgement of a disconnect. Ignores devices that were removed meanwhile.
    pub fn acknowledge(&self, device: &str, connection: u64) {
        if let Some(entry) = self.entries.get(device) {
            let step = entry.device.step(HeldDeviceEvent::Acknowledged(connection), &self.shared.news);
            step.expect("only calls are refused");
        }
    }

    /// Marks all devices as unknown to a gateway.
    pub fn gateway_lost(&self) {
        for device in self.all() {
            device.step(HeldDeviceEvent::GatewayLost, &self.shared.news).expect("only calls are refused");
        }
    }

    fn device(&self, name: &str) -> Result<&Rc<HeldDevice>, HolderRefusal> {
        match self.entries.get(name) {
            Some(entry) => Ok(&entry.device),
            None => Err(HolderRefusal::UnknownDevice(name.to_owned())),
        }
    }

    fn change(
        &self,
        change: HeldChange,
        event: impl FnOnce(HeldChange) -> HeldDeviceEvent,
    ) -> Result<(), HolderRefusal> {
        let device = self.device(&change.device)?.clone();
        device.step(event(change), &self.shared.news)
    }

    fn add(&mut self, name: String, path: String, framing: Framing) -> Result<(), HolderRefusal> {
        if self.entries.contains_key(&name) {
            return Err(HolderRefusal::DeviceExists(name));
        }
        framing.check()?;
        if self.entries.len() >= self.limits.devices_max {
            return Err(HolderRefusal::TooManyDevices { max: self.limits.devices_max });
        }
        let fds = self.reserve(framing)?;
        // Without this check, the test whether a process listens would connect to another device.
        let present = SocketFile::id_at(Path::new(&path));
        if present.is_some_and(|id| self.entries.values().any(|entry| entry.file.id() == id)) {
            return Err(SocketFileError::InUse(path).into());
        }
        let (listener, file) = SocketFile::listen(Path::new(&path), self.socket_mode)?;
        let listener = UnixListener::from_std(listener)
            .map_err(|e| SocketFileError::Failed { path: path.clone(), reason: e.to_string() })?;
        let limits =
            DeviceLimits { kept_fds_max: self.limits.kept_fds_max, reply_fds_max: framing.message_fds_max };
        let machine = DeviceMachine::new(name.clone(), limits);
        let device = Rc::new(HeldDevice::new(path, framing, name.clone(), machine));
        let serve = front_end::serve(device.clone(), listener, self.shared.clone());
        let task = Task(base::task::spawn_local(ThreadClass::Admin, serve));
        self.entries.insert(name, Entry { file, device, fds, _task: task });
        Ok(())
    }

    fn remove(&mut self, name: &str) -> Result<(), HolderRefusal> {
        let entry = self.entries.remove(name).ok_or_else(|| HolderRefusal::UnknownDevice(name.to_owned()))?;
        entry.device.remove();
        Ok(())
    }

    /// Returns the number of descriptors that a device may need, if the process can still open them. So
    /// a device with many descriptors takes none from other devices.
    fn reserve(&self, framing: Framing) -> Result<u64, HolderRefusal> {
        let messages = (UNANSWERED_MAX + OUTBOX_MAX) * framing.message_fds_max as usize;
        // Listener, connection, kept descriptors, and messages in both directions.
        let needed = (2 + self.limits.kept_fds_max + messages) as u64;
        let reserved = OWN_FDS + self.entries.values().map(|entry| entry.fds).sum::<u64>();
        let left = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).saturating_sub(reserved);
        if needed > left { Err(HolderRefusal::TooFewDescriptors { needed, left }) } else { Ok(needed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_of_a_faulty_gateway_is_refused_before_it_reaches_a_device() {
        let mut devices = Devices::new(HolderLimits::default(), 0o600);
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let long = "x".repeat(1 << 20);
        let refused = devices.execute(HolderCall::Remove { device: long }, vec![]).unwrap().unwrap_err();
        assert!(matches!(refused, HolderRefusal::BadName(_)));
        let change =
            HeldChange { device: "d".into(), connection: 1, state: None, keep: vec![1], drop: vec![] };
        for (call, fds, stated) in [
            (HolderCall::Stop, vec![null()], 0),
            (HolderCall::Deposit(change.clone()), vec![], 1),
            (HolderCall::Deposit(change.clone()), vec![null(), null()], 1),
            (HolderCall::Done { number: 1, change, reply: None, close: false }, vec![null(), null()], 1),
        ] {
            let arrived = fds.len();
            assert_eq!(devices.execute(call, fds), Err(BadFrame::Fds { stated, arrived }));
        }
    }
}
