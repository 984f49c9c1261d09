//! [`Gateways`]: executes requests about disks on the gateways that serve a tenant.

use std::sync::Arc;

use base::BoxFuture;
use wire::{DiskReply, DiskRequest, Error, Result};

/// The gateways that are connected to the control plane.
pub trait Gateways: Send + Sync {
    /// Executes a request on a gateway of a tenant. The osd has checked the rights of the caller.
    fn execute(&self, tenant: u32, request: DiskRequest) -> BoxFuture<'static, Result<DiskReply>>;
}

/// The gateways of the node. The default has none.
#[derive(Clone, Default)]
pub struct GatewaysAt(pub Option<Arc<dyn Gateways>>);

impl std::fmt::Debug for GatewaysAt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GatewaysAt")
    }
}

impl GatewaysAt {
    pub(crate) async fn execute(&self, tenant: u32, request: DiskRequest) -> Result<DiskReply> {
        match &self.0 {
            Some(gateways) => gateways.execute(tenant, request).await,
            None => Err(Error::CommandRefused(
                "the node has no gateway; start one with `outboard gateway`".into(),
            )),
        }
    }
}
