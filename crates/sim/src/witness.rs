//! [`SimWitness`]: the storage of the osd's witness, on the DPU's side.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base::BoxFuture;
use osd::WitnessStorage;

/// Duration of each of the two halves of a write.
const HALF: Duration = Duration::from_millis(2);

/// Storage that keeps its content when roles end or the power fails. The content changes in the
/// middle of a write, so a role that ends during a write leaves the old or the new content.
#[derive(Debug, Default)]
pub struct SimWitness {
    content: Arc<Mutex<Option<Vec<u8>>>>,
}

impl WitnessStorage for SimWitness {
    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.content.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    fn replace(&self, new: Vec<u8>) -> BoxFuture<'static, io::Result<()>> {
        let content = Arc::clone(&self.content);
        Box::pin(async move {
            tokio::time::sleep(HALF).await;
            *content.lock().unwrap_or_else(PoisonError::into_inner) = Some(new);
            tokio::time::sleep(HALF).await;
            Ok(())
        })
    }
}
