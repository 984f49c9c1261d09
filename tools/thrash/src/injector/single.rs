//! Harms targets of pools without redundancy. While no client changes anything, checks that the
//! node keeps its promises about such a target (`docs/semantics.md`), and then undoes the harm.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use client::{Error, NodeError};
use tokio::task::JoinSet;

use super::drives::file_error;
use super::{InjectError, InjectResult, Injector, not_possible};
use crate::calls::CheckedPool;
use crate::image::flip_bits;
use crate::ledger::{BrokenPromise, BrokenReport};
use crate::record::{HEAL_TIME, SharedLedger, locked};
use crate::thrashed_node::wait;

/// Number of objects that are written to find the targets that take changes.
const PROBES: u32 = 24;
/// Number of objects that are read at the same time.
const READS: usize = 64;
/// Time limit of a read that may fail.
const SHORT: Duration = Duration::from_secs(3);

/// What happens to the file of a target.
#[derive(Debug)]
pub(super) enum TargetHarm {
    /// The older copy at this path replaces the file.
    Stale(PathBuf),
    /// Bits flip in blocks that have changed.
    Damaged {
        /// Hashes of the blocks, from which the changed blocks are known.
        before: Vec<u64>,
        /// Seed of the choice of bits.
        seed: u64,
    },
}

impl TargetHarm {
    /// Harms a file. Returns what was done; `None` if nothing was.
    fn apply(&self, image: &Path) -> std::io::Result<Option<String>> {
        match self {
            TargetHarm::Stale(older) => {
                fs::rename(older, image)?;
                Ok(Some("is an older copy".to_owned()))
            }
            TargetHarm::Damaged { before, seed } => {
                let flipped = flip_bits(image, before, *seed)?;
                Ok((!flipped.is_empty()).then(|| format!("has flipped bits in bytes {flipped:?}")))
            }
        }
    }
}

fn unavailable<T>(text: String) -> InjectResult<T> {
    Err(InjectError::Broken(BrokenReport { promise: BrokenPromise::Unavailable, text }))
}

impl Injector {
    /// Harms a target of a pool without redundancy while no client changes anything. Checks that
    /// the node serves all objects on other targets, that no read returns wrong data, and that the
    /// node reports a stale target. Then undoes the harm.
    pub(super) fn harm_single(&mut self, target: usize, harm: &TargetHarm) -> InjectResult<String> {
        let gate = Arc::clone(&self.gate);
        let closing = async { tokio::time::timeout(Duration::from_secs(60), gate.write()).await };
        let Ok(_closed) = self.runtime.block_on(closing) else {
            return not_possible("calls are in progress for more than 60 s");
        };
        self.halt()?;
        let elsewhere = match self.config.targets {
            1 => BTreeSet::new(),
            _ => self.objects_elsewhere(target)?,
        };
        let image = self.node.image(target);
        let intact = image.with_extension("intact");
        fs::copy(&image, &intact).map_err(file_error)?;
        self.record.set_data_is_lost(true);
        let judged = match harm.apply(&image).map_err(file_error) {
            Ok(Some(what)) => self.judge(target, &what, harm, &elsewhere),
            Ok(None) => not_possible("nothing was changed in the file"),
            Err(error) => Err(error),
        };
        // The harm is undone also after a violation, so that the node's state can be examined.
        let undone = self.undo(target, &intact);
        self.record.set_data_is_lost(false);
        self.record.forget_pause();
        judged.and_then(|text| undone.map(|()| text))
    }

    /// Starts the stopped node without a target, and stops it again. Returns the names of all
    /// objects on other targets, which the node must list and change without this target.
    fn objects_elsewhere(&mut self, target: usize) -> InjectResult<BTreeSet<String>> {
        self.take_away(target)?;
        self.start()?;
        let (pool, is_full) = (self.pool.clone(), self.record.is_full());
        let elsewhere = self.runtime.block_on(async {
            put_probes(&pool, is_full).await.or_else(unavailable)?;
            let (names, skipped) = list(&pool).await.or_else(unavailable)?;
            let lost = groups_on(&pool, target).await.or_else(unavailable)?;
            match skipped == lost {
                true => Ok(names),
                false => unavailable(format!(
                    "{lost} placement groups are on target {target}, but without it, the listing lacks {skipped}"
                )),
            }
        });
        self.kill_all()?;
        self.return_drives();
        elsewhere
    }

    /// Starts the node with a harmed target, and checks what it does.
    fn judge(
        &mut self,
        target: usize,
        what: &str,
        harm: &TargetHarm,
        elsewhere: &BTreeSet<String>,
    ) -> InjectResult<String> {
        let what = format!("target {target} {what}");
        match self.start() {
            Ok(_) => {}
            // Without another target, the node has nothing to serve.
            Err(_) if self.config.targets == 1 => return Ok(format!("{what}; the node refused to start")),
            Err(InjectError::Broken(BrokenReport { promise, text })) => {
                let text = format!("{what}, and the node does not start with its other targets: {text}");
                return Err(InjectError::Broken(BrokenReport { promise, text }));
            }
            Err(error) => return Err(error),
        }
        let is_stale = matches!(harm, TargetHarm::Stale(_));
        self.check_ledgers(&what, is_stale, elsewhere)?;
        let (pool, is_full) = (self.pool.clone(), self.record.is_full());
        self.runtime.block_on(async {
            change_probes(&pool, is_full, elsewhere)
                .await
                .or_else(|why| unavailable(format!("{what}; {why}")))
        })?;
        if is_stale {
            self.check_stale_listing(&what, elsewhere)?;
            self.check_reported(target, &what)?;
        }
        Ok(format!("{what}; {} objects are elsewhere", elsewhere.len()))
    }

    /// Reads all objects. Those on other targets must be readable, and those on a stale target must
    /// not.
    fn check_ledgers(&self, what: &str, is_stale: bool, elsewhere: &BTreeSet<String>) -> InjectResult {
        for part in self.record.ledgers().chunks(READS) {
            let mut reads = JoinSet::new();
            self.runtime
                .block_on(async {
                    for ledger in part {
                        let (name, exists) = {
                            let ledger = locked(ledger);
                            (ledger.name().to_owned(), ledger.exists())
                        };
                        let is_elsewhere = elsewhere.contains(&name);
                        let (pool, ledger) = (self.pool.clone(), Arc::clone(ledger));
                        reads.spawn(async move {
                            let was_read = read_within(&pool, &ledger, is_elsewhere).await;
                            let is_on_target = !is_elsewhere && exists == Some(true);
                            if is_elsewhere && !was_read {
                                return unavailable(format!(
                                    "{name} is on another target, and cannot be read"
                                ));
                            }
                            if is_stale && is_on_target && was_read {
                                return unavailable(format!("{name} is on the stale target, and was read"));
                            }
                            Ok(())
                        });
                    }
                    reads.join_all().await.into_iter().collect::<InjectResult>()
                })
                .map_err(|error| error.preceded_by(what))?;
        }
        Ok(())
    }

    /// Checks that the listing contains the objects on other targets, and no others.
    fn check_stale_listing(&self, what: &str, elsewhere: &BTreeSet<String>) -> InjectResult {
        let listed = self.runtime.block_on(list(&self.pool));
        let (names, _) = listed.or_else(|why| unavailable(format!("{what}; {why}")))?;
        if names == *elsewhere {
            return Ok(());
        }
        let missing: Vec<_> = elsewhere.difference(&names).take(10).collect();
        let further: Vec<_> = names.difference(elsewhere).take(10).collect();
        unavailable(format!(
            "{what}; the listing lacks {missing:?}, and has objects of the target: {further:?}"
        ))
    }

    /// Checks that the status reports that a target has gone back to an earlier state.
    fn check_reported(&self, target: usize, what: &str) -> InjectResult {
        let reported = wait(HEAL_TIME, || {
            self.node.summary().is_ok_and(|summary| summary.targets_in_state("went back").contains(&target))
        });
        if reported {
            return Ok(());
        }
        let states = self.node.summary().map(|summary| (summary.targets, summary.problems));
        let text = format!("{what}, but the status does not say that it went back: {states:?}");
        Err(InjectError::Broken(BrokenReport { promise: BrokenPromise::NotReported, text }))
    }

    /// Starts the node with the intact file of a target.
    fn undo(&mut self, target: usize, intact: &Path) -> InjectResult {
        // If the node has refused to start, there is nothing to kill.
        let _ = self.kill_all();
        fs::rename(intact, self.node.image(target)).map_err(file_error)?;
        self.start()?;
        // The node has used the damaged file, so the intact one is an older copy for it. The
        // operator knows that no client has changed anything on this target meanwhile.
        let _ = self.node.run(&["target", "forget", &target.to_string(), "--accept-loss"]);
        Ok(())
    }
}

/// Reads and checks an object. If it must be readable, repeats failed reads for 30 s. Returns
/// whether a read succeeded.
async fn read_within(pool: &CheckedPool, ledger: &SharedLedger, must: bool) -> bool {
    let began = Instant::now();
    loop {
        let limit = if must { HEAL_TIME } else { SHORT };
        let was_read = tokio::time::timeout(limit, pool.check(ledger)).await.unwrap_or(false);
        if was_read || !must || began.elapsed() > HEAL_TIME {
            return was_read;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Returns the name of an object that is changed to find the targets that take changes.
fn probe_name(number: u32) -> String {
    format!("beside/{number}")
}

/// Writes objects. A write may fail because its target has failed, or because targets are full.
async fn put_probes(pool: &CheckedPool, is_full: bool) -> Result<(), String> {
    let mut puts = JoinSet::new();
    for number in 0..PROBES {
        let pool = pool.clone();
        puts.spawn(async move {
            match put_probe(&pool, number).await {
                Err(Error::Node(NodeError::TargetFailed(_))) => Ok(()),
                result => without_space(is_full, result),
            }
        });
    }
    let result: client::Result<()> = puts.join_all().await.into_iter().collect();
    result.map_err(|error| format!("a put fails while a target is missing: {error}"))
}

/// Writes an object. The first attempt may use a connection that the restart of the node has closed.
/// The outcome is then unknown, and a second attempt is needed.
async fn put_probe(pool: &CheckedPool, number: u32) -> client::Result<()> {
    let object = pool.pool().object(&probe_name(number))?;
    let first = object.put(probe_name(number)).await;
    let is_unknown =
        matches!(&first, Err(Error::OutcomeUnknown(_) | Error::Node(NodeError::OutcomeUnknown(_))));
    let last = if is_unknown { object.put(probe_name(number)).await } else { first };
    last.map(|_| ())
}

/// Reads and writes the objects of [`put_probes`] that are on other targets. Repeats failed calls
/// for 30 s.
async fn change_probes(
    pool: &CheckedPool,
    is_full: bool,
    elsewhere: &BTreeSet<String>,
) -> Result<(), String> {
    let mut changes = JoinSet::new();
    for name in (0..PROBES).map(probe_name).filter(|name| elsewhere.contains(name)) {
        let pool = pool.clone();
        changes.spawn(async move {
            let change = async || {
                let object = pool.pool().object(&name)?;
                let data = object.get().await?;
                without_space(is_full, object.put(name.clone()).await)?;
                Ok::<_, Error>(data == name)
            };
            let began = Instant::now();
            loop {
                match change().await {
                    Ok(true) => return Ok(()),
                    Ok(false) => return Err(format!("{name} was read with other data")),
                    Err(error) if began.elapsed() > HEAL_TIME => {
                        return Err(format!("{name} is on another target, and cannot be changed: {error}"));
                    }
                    Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
                }
            }
        });
    }
    changes.join_all().await.into_iter().collect()
}

/// Returns the result of a write, except that a full target is no failure.
fn without_space<T>(is_full: bool, result: client::Result<T>) -> client::Result<()> {
    match result {
        Err(Error::Node(NodeError::NoSpace { .. })) if is_full => Ok(()),
        result => result.map(|_| ()),
    }
}

/// Returns the names of the objects on available targets, and the number of placement groups on
/// other targets.
async fn list(pool: &CheckedPool) -> Result<(BTreeSet<String>, u32), String> {
    let mut names = BTreeSet::new();
    let mut listing = pool.pool().list("").skip_unavailable();
    while let Some(name) = listing.next().await.map_err(|error| format!("the listing failed: {error}"))? {
        names.insert(name.object().to_owned());
    }
    Ok((names, listing.skipped().map_or(0, |skipped| skipped.groups)))
}

/// Returns the number of placement groups on a target that the node does not use.
async fn groups_on(pool: &CheckedPool, target: usize) -> Result<u32, String> {
    match pool.client().forget_target(target as u32, false).await {
        Ok(losses) => Ok(losses.iter().map(|loss| loss.waiting).sum()),
        // No group is on the target.
        Err(Error::Node(NodeError::CommandRefused(_))) => Ok(0),
        Err(error) => Err(format!("the loss of target {target} cannot be determined: {error}")),
    }
}
