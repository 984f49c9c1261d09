//! [`SimWitness`]: the storage of the osd's witness, on the DPU's side.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::BoxFuture;
use osd::WitnessStorage;
use rand::Rng;
use rand::rngs::StdRng;
use tokio::time::sleep;

/// Duration of each of the two halves of a write.
const HALF: Duration = Duration::from_millis(2);

/// Trouble with writes of the witness.
#[derive(Debug)]
pub struct WriteTrouble {
    /// Decides what happens to each write.
    pub rng: StdRng,
    /// Probability that a write fails or is late.
    pub probability: f64,
    /// Maximum delay of a late write; `None` if writes fail.
    pub late_max: Option<Duration>,
}

/// Effects of faults on the witness.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WitnessCounts {
    /// Writes that have failed.
    pub failed_writes: u64,
    /// Writes that were late.
    pub late_writes: u64,
    /// How often the witness was lost.
    pub losses: u64,
    /// How often an older copy has replaced the witness.
    pub older_copies: u64,
}

/// What happens to a write.
#[derive(Debug, Clone, Copy)]
enum WriteOutcome {
    Succeeds,
    Late(Duration),
    /// The write fails, but may have stored the content.
    Fails {
        is_stored: bool,
    },
}

#[derive(Debug, Default)]
struct SimFile {
    content: Option<Vec<u8>>,
    /// The content after each write.
    copies: Vec<Vec<u8>>,
    trouble: Option<WriteTrouble>,
    counts: WitnessCounts,
}

/// Storage that keeps its content when roles end or the power fails. The content changes in the
/// middle of a write, so a role that ends during a write leaves the old or the new content.
#[derive(Debug, Default)]
pub struct SimWitness {
    file: Arc<Mutex<SimFile>>,
}

impl SimWitness {
    fn file(&self) -> MutexGuard<'_, SimFile> {
        lock(&self.file)
    }

    /// Begins trouble with writes, or ends it.
    pub fn trouble(&self, trouble: Option<WriteTrouble>) {
        self.file().trouble = trouble;
    }

    /// Removes the content. No osd may run.
    pub fn lose(&self) {
        let mut file = self.file();
        file.content = None;
        file.counts.losses += 1;
    }

    /// Replaces the content by an older copy of itself, which `choice` selects. No osd may run.
    /// Returns false if there is none.
    pub fn go_back(&self, choice: u64) -> bool {
        let mut file = self.file();
        let older = file.copies.iter().filter(|copy| file.content.as_ref() != Some(copy));
        let older: Vec<Vec<u8>> = older.cloned().collect();
        let Some(count) = (older.len() as u64).checked_sub(1) else { return false };
        file.content = Some(older[(choice % (count + 1)) as usize].clone());
        file.counts.older_copies += 1;
        true
    }

    /// Effects of faults so far.
    #[must_use]
    pub fn counts(&self) -> WitnessCounts {
        self.file().counts
    }
}

impl SimFile {
    /// Decides what happens to the next write.
    fn next_outcome(&mut self) -> WriteOutcome {
        let Some(WriteTrouble { rng, probability, late_max }) = &mut self.trouble else {
            return WriteOutcome::Succeeds;
        };
        if !rng.random_bool(*probability) {
            return WriteOutcome::Succeeds;
        }
        match late_max {
            Some(most) => {
                self.counts.late_writes += 1;
                WriteOutcome::Late(rng.random_range(Duration::ZERO..*most))
            }
            None => {
                self.counts.failed_writes += 1;
                WriteOutcome::Fails { is_stored: rng.random_bool(0.3) }
            }
        }
    }
}

impl WitnessStorage for SimWitness {
    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.file().content.clone())
    }

    fn replace(&self, new: Vec<u8>) -> BoxFuture<'static, io::Result<()>> {
        let (file, outcome) = (Arc::clone(&self.file), self.file().next_outcome());
        Box::pin(async move {
            if let WriteOutcome::Late(delay) = outcome {
                sleep(delay).await;
            }
            sleep(HALF).await;
            if !matches!(outcome, WriteOutcome::Fails { is_stored: false }) {
                let mut file = lock(&file);
                file.copies.push(new.clone());
                file.content = Some(new);
            }
            sleep(HALF).await;
            match outcome {
                WriteOutcome::Fails { .. } => Err(io::Error::other("an injected fault")),
                _ => Ok(()),
            }
        })
    }
}

fn lock(file: &Mutex<SimFile>) -> MutexGuard<'_, SimFile> {
    file.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_witness_has_the_last_content_and_can_go_back() {
        let witness = SimWitness::default();
        assert_eq!(witness.load().unwrap(), None);
        for content in [b"one", b"two"] {
            assert!(!witness.go_back(0), "there is no older copy");
            witness.replace(content.to_vec()).await.unwrap();
            assert_eq!(witness.load().unwrap().unwrap(), content);
        }
        assert!(witness.go_back(7));
        assert_eq!(witness.load().unwrap().unwrap(), b"one");
        witness.lose();
        assert_eq!(witness.load().unwrap(), None);
        assert_eq!((witness.counts().losses, witness.counts().older_copies), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn writes_fail_or_are_late_until_the_trouble_ends() {
        let witness = SimWitness::default();
        let trouble = |late_max| {
            witness.trouble(Some(WriteTrouble { rng: StdRng::seed_from_u64(1), probability: 1.0, late_max }));
        };
        trouble(None);
        let (mut stored, count) = (0, 100u64);
        for n in 0..count {
            witness.replace(n.to_le_bytes().to_vec()).await.unwrap_err();
            stored += u64::from(witness.load().unwrap() == Some(n.to_le_bytes().to_vec()));
        }
        assert!(stored > 10 && stored < count - 10, "a failed write may have stored the content");
        trouble(Some(Duration::from_secs(10)));
        let began = tokio::time::Instant::now();
        witness.replace(b"late".to_vec()).await.unwrap();
        assert!(began.elapsed() > 10 * HALF);
        witness.trouble(None);
        witness.replace(b"last".to_vec()).await.unwrap();
        assert_eq!(witness.load().unwrap().unwrap(), b"last");
        assert_eq!((witness.counts().failed_writes, witness.counts().late_writes), (count, 1));
    }
}
