//! [`Filler`]: fills the targets with objects, and removes these objects.

use std::sync::Arc;
use std::time::{Duration, Instant};

use client::{Error, NodeError};

use crate::calls::CheckedPool;
use crate::content;
use crate::ledger::{BrokenPromise, BrokenReport};
use crate::record::RoundRecord;

/// Sizes of objects, in bytes. When an object of one size finds no space, the filler continues with
/// the next size.
const SIZES: [u64; 3] = [1 << 20, 64 << 10, 4096];
/// Number of refusals of a size after which the filler continues with the next size. Several
/// refusals are needed, because the name of an object determines its targets.
const REFUSALS: u32 = 12;
/// Time after which the filler gives up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Fills the targets.
#[derive(Debug)]
pub struct Filler {
    pool: CheckedPool,
    record: Arc<RoundRecord>,
    /// Numbers of the objects that exist or may exist.
    objects: Vec<u64>,
    /// Numbers and sizes of the objects that certainly exist.
    stored: Vec<(u64, u64)>,
    next: u64,
    /// Number of failures for other reasons than a lack of space.
    failures: u32,
}

impl Filler {
    /// Creates a filler that has stored nothing.
    pub fn new(pool: CheckedPool, record: Arc<RoundRecord>) -> Filler {
        Filler { pool, record, objects: Vec::new(), stored: Vec::new(), next: 0, failures: 0 }
    }

    fn name(number: u64) -> String {
        format!("fill/{number}")
    }

    /// Stores objects until none has space. Returns the number of stored objects; `None` if the
    /// targets did not become full in time.
    pub async fn fill(&mut self) -> Option<usize> {
        self.record.may_be_full();
        let began = Instant::now();
        for size in SIZES {
            let mut refusals = 0;
            while refusals < REFUSALS {
                if began.elapsed() > PATIENCE || self.record.is_over() {
                    return None;
                }
                refusals += self.put_some(size).await;
            }
        }
        Some(self.objects.len())
    }

    /// Stores several objects at the same time. Returns how many of them found no space.
    async fn put_some(&mut self, size: u64) -> u32 {
        let mut puts = tokio::task::JoinSet::new();
        for _ in 0..8 {
            self.next += 1;
            let number = self.next;
            self.objects.push(number);
            let pool = self.pool.clone();
            puts.spawn(async move {
                let object = pool.pool().object(&Filler::name(number))?;
                object.put(content::stamped(number, 0, 0, size)).await.map(|_| number)
            });
        }
        let (mut refused, mut failure) = (0, None);
        for result in puts.join_all().await {
            match result {
                Err(Error::Node(NodeError::NoSpace { .. })) => refused += 1,
                Err(error) => failure = Some(error),
                Ok(number) => self.stored.push((number, size)),
            }
        }
        if let Some(error) = failure {
            self.failures += 1;
            if self.failures <= 2 {
                self.record.note(format!("a put of the filler failed: {error}"));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        refused
    }

    /// Returns whether there are objects that certainly exist.
    pub fn has_stored(&self) -> bool {
        !self.stored.is_empty()
    }

    /// Reads and removes some of the objects. Both work on full targets. Records a violation if an
    /// object is lost or has other data.
    ///
    /// # Errors
    /// If a call fails, or if no object is left.
    pub async fn read_and_remove_some(&mut self) -> Result<(), String> {
        // The newest objects are the smallest.
        let first = self.stored.len().saturating_sub(8);
        if self.stored.is_empty() {
            return Err("the targets are full, but no object that filled them is left".to_owned());
        }
        self.read(&self.stored[first..]).await?;
        // If this call is interrupted, it is unknown whether these objects exist.
        let some = self.stored.split_off(first);
        let count = some.len();
        let mut removals = tokio::task::JoinSet::new();
        for (number, size) in some {
            let pool = self.pool.clone();
            removals.spawn(async move {
                let removed = async { pool.pool().object(&Filler::name(number))?.remove().await }.await;
                (number, size, removed)
            });
        }
        let mut failure = Ok(());
        for (number, size, removed) in removals.join_all().await {
            let Err(error) = removed else { continue };
            self.report_loss(&error);
            if !error.may_have_taken_effect() {
                self.stored.push((number, size));
            }
            failure = Err(format!("an object on a full target cannot be removed: {error}"));
        }
        if failure.is_ok() {
            self.record.note(format!("{count} objects were read and removed while targets are full"));
        }
        failure
    }

    /// Reads objects, and checks their data.
    async fn read(&self, objects: &[(u64, u64)]) -> Result<(), String> {
        let mut reads = tokio::task::JoinSet::new();
        for (number, size) in objects.iter().copied() {
            let pool = self.pool.clone();
            reads.spawn(async move {
                let data = pool.pool().object(&Filler::name(number))?.get().await?;
                Ok::<_, Error>((number, data == content::stamped(number, 0, 0, size)))
            });
        }
        let mut failure = Ok(());
        for result in reads.join_all().await {
            match result {
                Ok((_, true)) => {}
                Ok((number, false)) => {
                    let text = format!("{} was read with other data", Filler::name(number));
                    self.report(BrokenPromise::MixedContent, text);
                }
                Err(error) => {
                    self.report_loss(&error);
                    failure = Err(format!("an object on a full target cannot be read: {error}"));
                }
            }
        }
        failure
    }

    /// Records a violation if an object that certainly exists was not found.
    fn report_loss(&self, error: &Error) {
        if error.is_not_found() {
            self.report(BrokenPromise::LostChange, error.to_string());
        }
    }

    fn report(&self, promise: BrokenPromise, text: String) {
        self.record.violated(None, BrokenReport { promise, text });
    }

    /// Removes all objects. Removals work on full targets.
    ///
    /// # Errors
    /// If a removal fails for a reason that no fault excuses.
    pub async fn empty(&mut self) -> Result<(), String> {
        for part in self.objects.chunks(8) {
            let mut removals = tokio::task::JoinSet::new();
            for number in part {
                let (pool, number) = (self.pool.clone(), *number);
                removals.spawn(async move {
                    let began = Instant::now();
                    // Faults may last longer than one call.
                    while began.elapsed() < PATIENCE {
                        match pool.pool().object(&Filler::name(number))?.remove().await {
                            Ok(_) => return Ok(()),
                            Err(error) if error.is_not_found() => return Ok(()),
                            Err(error @ Error::Node(NodeError::NoSpace { .. })) => return Err(error),
                            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
                        }
                    }
                    Err(Error::TimedOut(PATIENCE.into()))
                });
            }
            for result in removals.join_all().await {
                result.map_err(|error| format!("an object on a full target cannot be removed: {error}"))?;
            }
        }
        self.objects.clear();
        self.stored.clear();
        self.record.is_no_longer_full();
        Ok(())
    }
}
