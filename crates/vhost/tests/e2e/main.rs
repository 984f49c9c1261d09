//! Tests of a device with a front end that acts as QEMU does.

mod back_end;
mod faults;
mod front_end;
mod guest;
mod lifecycle;
mod requests;

use vhost::memory::{GuestRam, MemoryRange};
