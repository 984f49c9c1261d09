//! Executes administrative requests, which manage pools, targets, scrubs and rates, or read the
//! node's status.

use std::rc::Rc;
use std::time::Duration;

use wire::{AdminReply, AdminRequest, Error, Result};

use crate::osd::Osd;
use crate::shard::Shard;
use crate::status;

impl Osd {
    /// Executes an administrative request. `is_repeated` says whether the request is a retry. A retry
    /// may find that an earlier attempt has already created or removed the pool; the retry then
    /// succeeds.
    pub(crate) async fn administer(
        self: &Rc<Osd>,
        body: AdminRequest,
        is_repeated: bool,
    ) -> Result<AdminReply> {
        match body {
            AdminRequest::PoolCreate { name, pg_count, redundancy } => {
                match self.create_pool(&name, pg_count, redundancy).await {
                    Err(Error::PoolExists(_)) if is_repeated => {}
                    created => created?,
                }
            }
            AdminRequest::PoolList => return Ok(AdminReply::Pools(self.list_pools())),
            AdminRequest::PoolRemove { name, force } => match self.remove_pool(&name, force).await {
                Err(Error::NoSuchPool(_)) if is_repeated => {}
                removed => removed?,
            },
            AdminRequest::TargetSetOut { index, out } => self.set_target_out(index, out).await?,
            AdminRequest::TargetReplace { index, uuid } => self.replace_target(index, uuid).await?,
            AdminRequest::TargetForget { index, accept_loss } => {
                return Ok(AdminReply::Loss(self.forget_target(index, accept_loss).await?));
            }
            AdminRequest::Scrub { pool, start, repair } => {
                return Ok(AdminReply::Scrub(Box::new(self.scrub(&pool, start, repair).await?)));
            }
            AdminRequest::SetRebuildRate(rate) => {
                self.shard.pace.set_rate(rate);
            }
            AdminRequest::SetCodingMode(mode) => {
                let set = self.shard.each(async move |shard: Rc<Shard>| shard.coding.set_mode(mode)).await?;
                set.into_iter().collect::<Result<()>>()?;
            }
            AdminRequest::Status => return Ok(AdminReply::Status(Box::new(status::status(self).await?))),
            AdminRequest::CollectOrphans { older_than_ms } => {
                let grace = Duration::from_millis(older_than_ms);
                let removed = self.shard.each(move |shard| shard.collect_orphans(grace)).await?;
                return Ok(AdminReply::Collected(removed.into_iter().sum()));
            }
            AdminRequest::Usage => return Ok(AdminReply::Usage(status::usage(&self.shard.config).await)),
            other => return Err(Error::BadRequest(format!("{other:?} is not supported"))),
        }
        Ok(AdminReply::Done)
    }
}
