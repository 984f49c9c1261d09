//! [`Gateways`]: executes requests about disks on the gateways that serve a tenant.

use std::sync::Arc;

use base::BoxFuture;
use wire::{DiskCommand, DiskReply, DiskRequest, Error, Result};

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
    /// Executes a request. If `is_repeated`, an earlier attempt may have taken effect. A refusal then means
    /// nothing if the disks show that it has.
    pub(crate) async fn execute(
        &self,
        tenant: u32,
        request: DiskRequest,
        is_repeated: bool,
    ) -> Result<DiskReply> {
        let Some(gateways) = &self.0 else {
            let why = "the node has no gateway; start one with `outboard gateway`";
            return Err(Error::CommandRefused(why.into()));
        };
        let list = DiskRequest { pool: request.pool.clone(), command: DiskCommand::List };
        let command = request.command.clone();
        let refusal = match gateways.execute(tenant, request).await {
            Err(e) if is_repeated && is_refusal(&e) => e,
            answer => return answer,
        };
        match gateways.execute(tenant, list).await {
            Ok(DiskReply::Disks(disks)) if command.has_taken_effect(&disks) => Ok(DiskReply::Done),
            _ => Err(refusal),
        }
    }
}

/// Whether a gateway has decided about the command.
fn is_refusal(e: &Error) -> bool {
    !e.is_transient() && !matches!(e, Error::OutcomeUnknown(_) | Error::Busy { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Refuses all commands but `List`, to which it answers that there are no disks.
    struct Empty;

    impl Gateways for Empty {
        fn execute(&self, _: u32, request: DiskRequest) -> BoxFuture<'static, Result<DiskReply>> {
            let answer = match request.command {
                DiskCommand::List => Ok(DiskReply::Disks(Vec::new())),
                _ => Err(Error::CommandRefused("no".into())),
            };
            Box::pin(std::future::ready(answer))
        }
    }

    #[tokio::test]
    async fn only_a_repetition_of_a_removal_succeeds_without_the_disk() {
        let gateways = GatewaysAt(Some(Arc::new(Empty)));
        let remove = DiskCommand::Remove { disk: "d".into(), with_snapshots: false };
        let create = DiskCommand::Create { disk: "d".into(), size: 4096, chunk: 0 };
        let refused = || Err(Error::CommandRefused("no".into()));
        for (command, is_repeated, expected) in [
            (remove.clone(), true, Ok(DiskReply::Done)),
            (remove, false, refused()),
            (create, true, refused()),
        ] {
            let request = DiskRequest { pool: "p".into(), command };
            assert_eq!(gateways.execute(1, request, is_repeated).await, expected);
        }
    }
}
