//! A device on the event loop: its state machine, and the tasks to wake after a step.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use tokio::sync::Notify;

use crate::device::{DeviceMachine, HeldDeviceEvent};
use crate::error::HolderRefusal;
use crate::framing::Framing;

/// A device of the holder. The task of its front end and the connection of the gateway share it.
#[derive(Debug)]
pub(crate) struct HeldDevice {
    /// Name of the device.
    pub name: String,
    /// Path of its socket.
    pub path: String,
    /// How the messages of its front ends are cut.
    pub framing: Framing,
    machine: RefCell<DeviceMachine>,
    /// Wakes the task of the front end.
    changed: Notify,
    is_in_queue: Cell<bool>,
    is_removed: Cell<bool>,
}

impl HeldDevice {
    pub fn new(path: String, framing: Framing, name: String, machine: DeviceMachine) -> HeldDevice {
        HeldDevice {
            name,
            path,
            framing,
            machine: RefCell::new(machine),
            changed: Notify::new(),
            is_in_queue: Cell::new(false),
            is_removed: Cell::new(false),
        }
    }

    /// Applies an event and wakes the tasks that have work now.
    pub fn step(self: &Rc<Self>, event: HeldDeviceEvent, queue: &NewsQueue) -> Result<(), HolderRefusal> {
        let result = self.machine.borrow_mut().step(event);
        self.changed.notify_one();
        queue.offer(self);
        result
    }

    /// Reads the state machine.
    pub fn look<T>(&self, look: impl FnOnce(&DeviceMachine) -> T) -> T {
        look(&self.machine.borrow())
    }

    /// Takes news or the inventory from the state machine.
    pub fn take<T>(&self, take: impl FnOnce(&mut DeviceMachine) -> T) -> T {
        take(&mut self.machine.borrow_mut())
    }

    /// Waits for a step. Only the task of the front end may wait.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Marks the device as removed: the gateway is told nothing more about it.
    pub fn remove(&self) {
        self.is_removed.set(true);
    }

    /// Whether the device was removed.
    pub fn is_removed(&self) -> bool {
        self.is_removed.get()
    }
}

/// The devices that have news for the gateway, in the order in which they got news. Each device is in
/// the queue at most once.
#[derive(Debug, Default)]
pub(crate) struct NewsQueue {
    devices: RefCell<VecDeque<Rc<HeldDevice>>>,
    arrived: Notify,
}

impl NewsQueue {
    /// Adds the device if it has news and is not in the queue.
    pub fn offer(&self, device: &Rc<HeldDevice>) {
        let has_news = !device.is_removed() && device.look(DeviceMachine::has_news);
        if has_news && !device.is_in_queue.replace(true) {
            self.devices.borrow_mut().push_back(device.clone());
            self.arrived.notify_one();
        }
    }

    /// Takes the next device.
    pub fn take(&self) -> Option<Rc<HeldDevice>> {
        let device = self.devices.borrow_mut().pop_front()?;
        let was_in_queue = device.is_in_queue.replace(false);
        assert!(was_in_queue, "a device knows whether it is in the queue");
        Some(device)
    }

    /// Waits until a device is added. Only the connection of the gateway may wait.
    pub async fn arrived(&self) {
        self.arrived.notified().await;
    }
}
