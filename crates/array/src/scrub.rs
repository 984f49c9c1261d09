//! Scrubs objects: compares the stored fragments of each object, and repairs damaged fragments.

use std::collections::BTreeSet;
use std::slice;

use base::block::{BLOCK, Payload};
use bytes::Bytes;
use futures::future::{LocalBoxFuture, join_all};
use store::{ObjectId, StoreCalls, StoreError};

use crate::ask::is_damage;
use crate::group::Group;
use crate::interval::{Interval, over};
use crate::member_link::MemberLink;
use crate::read::{FragmentRead, WholeObject};
use crate::view::MemberView;

/// Number of bytes of each fragment that a scrub compares at a time.
const SEGMENT: u64 = 512 << 10;

/// Results of a scrub.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Findings {
    /// Number of objects checked.
    pub objects: u64,
    /// Number of bytes read.
    pub bytes: u64,
    /// Number of fragments that were missing, unreadable or corrupt.
    pub damaged: u64,
    /// Number of damaged fragments that were repaired.
    pub repaired: u64,
    /// Number of objects whose fragments are readable but contradict each other. It is unknown
    /// which fragment is wrong.
    pub inconsistent: u64,
    /// Number of objects whose data does not have the recorded size.
    pub wrong_size: u64,
    /// Number of objects of wrong size whose data was changed to the recorded size.
    pub resized: u64,
}

impl Findings {
    /// Adds the numbers in `other` to the numbers in `self`.
    pub fn add(&mut self, other: &Findings) {
        self.objects += other.objects;
        self.bytes += other.bytes;
        self.damaged += other.damaged;
        self.repaired += other.repaired;
        self.inconsistent += other.inconsistent;
        self.wrong_size += other.wrong_size;
        self.resized += other.resized;
    }
}

/// Problems found with one object.
#[derive(Default)]
struct ScrubFinding {
    bytes: u64,
    damaged: Vec<usize>,
    contradicts: bool,
}

impl Group {
    /// Compares the records that the members store. If they differ, the content of a member was
    /// replaced by an older copy. In this case, ends the interval, because the decision at the
    /// beginning of the next interval excludes this member. Requests wait meanwhile.
    ///
    /// # Errors
    /// [`StoreError::Disconnected`] if the interval has ended.
    pub fn compare_records(&self) -> LocalBoxFuture<'_, store::Result<()>> {
        Box::pin(async move {
            let interval = self.any_interval().await?;
            let _closed = self.gate.write().await;
            self.still(&interval)?;
            let mut records = Vec::new();
            for link in interval.links.iter().flatten() {
                match self.view(link).await {
                    // A member that was rebuilt has other intents than the other members.
                    Ok(MemberView { state, .. }) => records.push(Some((state.last(), state.record))),
                    Err(StoreError::NoSuchObject(_) | StoreError::NoSuchCollection(_)) => records.push(None),
                    Err(e @ StoreError::Disconnected(_)) => return Err(e),
                    // The checks of the objects report this error.
                    Err(_) => {}
                }
            }
            if records.iter().all(|record| *record == records[0]) {
                return Ok(());
            }
            tracing::warn!(cid = %self.cid, "the members of a group store different records, so one of them has lost changes");
            self.end_interval(&interval);
            Err(over(interval.number))
        })
    }

    /// Lists the objects that at least one member has, from `from` on, in the order of their ids.
    /// The returned flag is true if more objects follow.
    pub fn scrub_page(
        &self,
        from: Option<ObjectId>,
        limit: usize,
    ) -> LocalBoxFuture<'_, store::Result<(Vec<ObjectId>, bool)>> {
        Box::pin(async move {
            let interval = self.any_interval().await?;
            let there = interval.links.iter().filter(|link| link.is_some());
            let pages =
                join_all(there.map(|link| self.list_of(slice::from_ref(link), from.clone(), limit))).await;
            // A member that cannot list its objects counts as a member without objects. The check
            // of each object then reports the error.
            let listed: Vec<_> = pages.iter().flatten().collect();
            if listed.is_empty() {
                return self.list_in(&interval, from, limit).await;
            }
            let end = listed.iter().filter(|(_, more)| *more).filter_map(|(ids, _)| ids.last()).min();
            let within = |oid: &&ObjectId| end.is_none_or(|end| *oid <= end);
            let ids: BTreeSet<&ObjectId> = listed.iter().flat_map(|(ids, _)| ids).filter(within).collect();
            Ok((ids.into_iter().cloned().collect(), end.is_some()))
        })
    }

    /// Checks one object, and repairs damaged fragments.
    pub fn scrub<'a>(&'a self, oid: &'a ObjectId) -> LocalBoxFuture<'a, store::Result<Findings>> {
        Box::pin(async move {
            if (self.is_internal)(oid) {
                return Ok(Findings::default());
            }
            let Some(verdict) = self.look_at(oid).await? else { return Ok(Findings::default()) };
            if verdict.contradicts {
                tracing::warn!(cid = %self.cid, %oid, "the fragments of an object contradict each other; it is unknown which of them is wrong");
            }
            let mut findings = Findings {
                objects: 1,
                bytes: verdict.bytes,
                damaged: verdict.damaged.len() as u64,
                inconsistent: u64::from(verdict.contradicts),
                ..Findings::default()
            };
            for position in verdict.damaged {
                match self.repair(oid, position).await {
                    Ok(()) => findings.repaired += 1,
                    Err(e) => tracing::warn!(%oid, position, error = %e, "cannot repair a damaged fragment"),
                }
            }
            Ok(findings)
        })
    }

    async fn look_at(&self, oid: &ObjectId) -> store::Result<Option<ScrubFinding>> {
        let interval = self.any_interval().await?;
        let _locked = self.objects.alone(oid).await;
        let _open = self.gate.read().await;
        self.still(&interval)?;
        match self.size_by_any(&mut self.live_links(&interval, oid), oid).await? {
            Some(size) => self.inspect(&interval, oid, size).await.map(Some),
            None => Ok(None),
        }
    }

    async fn inspect(&self, interval: &Interval, oid: &ObjectId, size: u64) -> store::Result<ScrubFinding> {
        let links = self.live_links(interval, oid);
        let mut verdict = ScrubFinding::default();
        let mut xattrs: Option<Vec<(Bytes, Bytes)>> = None;
        for (position, link) in links.iter().enumerate() {
            let Some(link) = link else { continue };
            let store = &link.target.store();
            let found = async {
                let stat = self.calls.answer(link, store.stat(&self.cid, oid)).await?;
                self.expect_len(link, WholeObject { oid, size }, position, stat.size)?;
                self.calls.answer(link, store.get_xattrs(&self.cid, oid)).await
            };
            match found.await {
                Ok(found) => verdict.contradicts |= *xattrs.get_or_insert(found.clone()) != found,
                Err(e) => verdict.damage(oid, position, e)?,
            }
        }
        let longest = self.layout.fragment_size(0, size);
        for at in (0..longest).step_by(SEGMENT as usize) {
            self.inspect_rows(&links, WholeObject { oid, size }, at, &mut verdict).await?;
        }
        Ok(verdict)
    }

    /// Compares up to `SEGMENT` bytes of each fragment, from offset `at` on.
    async fn inspect_rows(
        &self,
        links: &[Option<MemberLink>],
        whole: WholeObject<'_>,
        at: u64,
        verdict: &mut ScrubFinding,
    ) -> store::Result<()> {
        let WholeObject { oid, size } = whole;
        let end = (at + SEGMENT).min(self.layout.fragment_size(0, size));
        let reads = links.iter().enumerate().map(|(position, link)| {
            let to = end.min(self.layout.fragment_size(position, size));
            async move {
                match link {
                    Some(link) if to > at => self.read_from(link, whole, position, at..to, None).await,
                    _ => Ok(FragmentRead { bytes: Bytes::new(), checksums: Vec::new() }),
                }
            }
        });
        let rows = end.next_multiple_of(BLOCK) - at;
        let mut fragments: Vec<Option<Payload>> = vec![None; links.len()];
        for (position, read) in join_all(reads).await.into_iter().enumerate() {
            match read {
                Ok(read) => {
                    verdict.bytes += read.bytes.len() as u64;
                    let counts = links[position].is_some() && !verdict.damaged.contains(&position);
                    fragments[position] = counts.then(|| self.filled(&read, rows as usize));
                }
                Err(e) => verdict.damage(oid, position, e)?,
            }
        }
        // Reconstruct each further fragment from the first k readable fragments, and compare the
        // result with the stored bytes.
        let present: Vec<usize> = (0..fragments.len()).filter(|&i| fragments[i].is_some()).collect();
        if present.len() <= self.layout.k {
            return Ok(());
        }
        let (sources, others) = present.split_at(self.layout.k);
        let blocks: Vec<Payload> = sources.iter().filter_map(|&i| fragments[i].clone()).collect();
        let expected = self.recover(sources, others, blocks).await?;
        let differs = |(&other, expected): (&usize, &Payload)| {
            fragments[other].as_ref().map(Payload::data) != Some(expected.data())
        };
        verdict.contradicts |= others.iter().zip(&expected).any(differs);
        Ok(())
    }
}

impl ScrubFinding {
    /// Records a fragment that cannot be read.
    ///
    /// # Errors
    /// Returns `e` if the error does not mean that the fragment is damaged.
    fn damage(&mut self, oid: &ObjectId, position: usize, e: StoreError) -> store::Result<()> {
        if !is_damage(&e) {
            return Err(e);
        }
        if !self.damaged.contains(&position) {
            tracing::warn!(%oid, position, error = %e, "a scrub found a damaged fragment");
            self.damaged.push(position);
        }
        Ok(())
    }
}
