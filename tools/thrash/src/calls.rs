//! Calls on objects, whose answers go to the ledgers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use client::{Client, Error, NodeError, Pool};
use wire::{Query, QueryAnswer, QueryOp};

use crate::expected::{ExpectedRefusal, StampedChange};
use crate::ledger::{ChangeAnswer, ObjectView};
use crate::record::{RoundRecord, SharedLedger, locked};

/// The name of the pool under test.
pub const POOL: &str = "thrash";

/// Access to the pool, and the record of the round.
#[derive(Debug, Clone)]
pub struct CheckedPool {
    client: Client,
    pool: Pool,
    record: Arc<RoundRecord>,
}

impl CheckedPool {
    /// Creates the access over a client.
    ///
    /// # Errors
    /// If the pool's name is invalid.
    pub fn new(client: Client, record: Arc<RoundRecord>) -> client::Result<CheckedPool> {
        Ok(CheckedPool { pool: client.pool(POOL)?, client, record })
    }

    /// Returns the client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Makes a change, and checks its answer.
    pub async fn change(&self, ledger: &SharedLedger, change: StampedChange) {
        let (name, number) = {
            let ledger = locked(ledger);
            (ledger.name().to_owned(), ledger.number())
        };
        let Ok(object) = self.pool.object(&name) else { return };
        let compound = change.compound(&object, number);
        let removes = change.steps.contains(&crate::expected::ChangeStep::Remove);
        let what = format!("{name}: {change}");
        let began = Instant::now();
        locked(ledger).begin(change, self.record.now());
        let result = compound.commit().await;
        let answer = match &result {
            Ok(done) => {
                self.record.success("changed");
                ChangeAnswer::Acknowledged(*done)
            }
            Err(Error::Node(NodeError::ConditionFailed { .. })) => {
                self.record.success("refused");
                ChangeAnswer::Refused(ExpectedRefusal::GuardFailed, "the condition does not hold".to_owned())
            }
            Err(error) if removes && error.is_not_found() => {
                self.record.success("refused");
                ChangeAnswer::Refused(ExpectedRefusal::NoSuchObject, error.to_string())
            }
            Err(error) if error.may_have_taken_effect() => ChangeAnswer::Unknown(error.to_string()),
            Err(error) => ChangeAnswer::Unchanged(error.to_string()),
        };
        if let ChangeAnswer::Unknown(_) | ChangeAnswer::Unchanged(_) = answer
            && let Err(error) = &result
        {
            self.record.check(Some(ledger), self.record.failure(&what, began, error));
        }
        let ended = locked(ledger).end(self.record.now(), answer);
        self.record.check(Some(ledger), ended);
    }

    /// Reads the whole object, which no other task may change, and checks the result. Returns false
    /// if the object cannot be read.
    pub async fn check(&self, ledger: &SharedLedger) -> bool {
        let name = locked(ledger).name().to_owned();
        let (began, began_at) = (Instant::now(), self.record.now());
        match self.view(&name).await {
            Ok(Some(view)) => {
                self.record.success("read all");
                let seen = locked(ledger).observe(began_at, self.record.now(), &view);
                self.record.check(Some(ledger), seen);
                true
            }
            Ok(None) => false,
            Err(error) => {
                self.record.check(Some(ledger), self.record.failure(&format!("read {name}"), began, &error));
                false
            }
        }
    }

    /// Reads the whole object. Returns `None` if the object changed during each attempt, because
    /// changes of unknown outcome took effect.
    async fn view(&self, name: &str) -> client::Result<Option<ObjectView>> {
        let object = self.pool.object(name)?;
        for _ in 0..5 {
            let query = Query {
                name: object.name().to_wire(),
                conditions: Vec::new(),
                ops: vec![
                    QueryOp::Stat,
                    QueryOp::Xattrs,
                    QueryOp::OmapRange { from: Bytes::new(), to: None, limit: 1000 },
                ],
            };
            let answers = match self.client.query(query).await {
                Ok(answers) => answers,
                Err(error) if error.is_not_found() => return Ok(Some(ObjectView::Absent)),
                Err(error) => return Err(error),
            };
            let [
                QueryAnswer::Stat(stat),
                QueryAnswer::Xattrs(xattrs),
                QueryAnswer::Omap { entries, more: false },
            ] = answers.as_slice()
            else {
                return Err(Error::Protocol(format!("unexpected answers {answers:?}")));
            };
            let data = match object.get().await {
                Ok(data) => data,
                Err(error) if error.is_not_found() => continue,
                Err(error) => return Err(error),
            };
            match object.stat().await {
                Ok(after) if after.version == stat.version => {}
                Ok(_) => continue,
                Err(error) if error.is_not_found() => continue,
                Err(error) => return Err(error),
            }
            return Ok(Some(ObjectView::Present {
                version: stat.version,
                data: data.to_vec(),
                xattrs: texts(xattrs),
                omap: texts(entries),
            }));
        }
        Ok(None)
    }

    /// Reads the data of an object that another task may be changing, and checks the result.
    pub async fn read(&self, ledger: &SharedLedger) {
        let (name, read) = {
            let mut ledger = locked(ledger);
            (ledger.name().to_owned(), ledger.begin_read())
        };
        let Ok(object) = self.pool.object(&name) else { return };
        let (began, began_at) = (Instant::now(), self.record.now());
        let result = object.get().await;
        let data = match &result {
            Ok(data) => Some(Some(&data[..])),
            Err(error) if error.is_not_found() => Some(None),
            Err(_) => None,
        };
        match &result {
            Err(Error::Node(NodeError::Changed { .. })) => {}
            Err(error) if data.is_none() => {
                self.record.check(Some(ledger), self.record.failure(&format!("read {name}"), began, error));
            }
            _ => self.record.success("read"),
        }
        let ended = locked(ledger).end_read(read, began_at, self.record.now(), data);
        self.record.check(Some(ledger), ended);
    }
}

fn texts(pairs: &[(Bytes, Bytes)]) -> BTreeMap<String, String> {
    let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
    pairs.iter().map(|(name, value)| (text(name), text(value))).collect()
}
