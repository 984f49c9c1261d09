//! [`ServedFrontEnd`]: a front end that is being served.

use std::io;
use std::sync::Arc;

use disk::Disk;
use wire::FrontEnd;

use crate::attachments::DiskAttachment;
use crate::nbd_server::NbdServer;
use crate::vhost_devices::{VhostDevice, VhostDevices};

/// A front end that is being served. Dropping it stops the service.
#[derive(Debug)]
pub(crate) enum ServedFrontEnd {
    Nbd(NbdServer),
    Vhost { _device: VhostDevice },
}

impl ServedFrontEnd {
    /// Begins to serve the front end of an attachment.
    pub(crate) async fn start(
        attachment: &DiskAttachment,
        disk: Arc<dyn Disk>,
        devices: Option<&VhostDevices>,
    ) -> io::Result<ServedFrontEnd> {
        match &attachment.front_end {
            FrontEnd::Nbd(address) => {
                let place = attachment.place();
                let served = NbdServer::start(address, &place, disk, attachment.is_read_only);
                Ok(ServedFrontEnd::Nbd(served.await?))
            }
            FrontEnd::VhostUser(_) if attachment.is_read_only => {
                Err(io::Error::other("vhost-user devices are always writable; use NBD"))
            }
            FrontEnd::VhostUser(path) => {
                let none = || io::Error::other("the gateway has no holder, which vhost-user devices need");
                let devices = devices.ok_or_else(none)?;
                let _device = devices.start(&attachment.place(), path.as_ref(), disk).await?;
                Ok(ServedFrontEnd::Vhost { _device })
            }
            other => Err(io::Error::other(format!("this gateway does not serve {other}"))),
        }
    }

    /// Returns the address at which the front end is served.
    pub(crate) fn address(&self, asked: &FrontEnd) -> FrontEnd {
        match self {
            ServedFrontEnd::Nbd(server) => FrontEnd::Nbd(server.address().to_owned()),
            ServedFrontEnd::Vhost { .. } => asked.clone(),
        }
    }
}
