//! The block device (virtio 1.2, section 5.2): its features, configuration and requests.

mod config;
mod request;

pub(crate) use config::{CONFIG_LEN, config_space, device_features};
pub(crate) use request::{BlkCompletion, BlkExecution, BlkRequest, BlkStatus};
