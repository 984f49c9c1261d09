//! Offers of host memory to engines that reach it over a network. The network device is opened when
//! the first osd asks for an offer.

use std::sync::{Arc, Mutex, PoisonError};

use base::fault::Faults;
use channel::ofi::{OfiHost, OfiHostOptions};

/// The source of offers, which the loops of a server share.
pub(super) struct OfiHostSource {
    options: Option<OfiHostOptions>,
    host: Mutex<Option<Arc<OfiHost>>>,
}

impl OfiHostSource {
    /// Creates a source with these options and faults. If `options` is `None`, the source makes no
    /// offers.
    pub(super) fn new(options: Option<OfiHostOptions>, faults: &Faults) -> OfiHostSource {
        let options = options.map(|options| OfiHostOptions { faults: faults.clone(), ..options });
        OfiHostSource { options, host: Mutex::default() }
    }

    /// Returns the host for engines that use `provider`. Call this before every offer, because it
    /// replaces a host whose device has failed. The first call, and the first call after a failure,
    /// loads libfabric and opens the device, which may take a moment.
    ///
    /// # Errors
    /// The error is a text for the osd's status. It says why there is no host, and what to do.
    pub(super) fn host(&self, provider: &str) -> Result<Arc<OfiHost>, String> {
        let Some(options) = &self.options else {
            return Err(
                "this store offers no memory by libfabric; configure an address for it to listen on, \
                 or configure the engine shm for the osd"
                    .to_owned(),
            );
        };
        if options.provider != provider {
            return Err(format!(
                "this store uses libfabric's provider {}, the osd uses {provider}; \
                 configure the same provider for both",
                options.provider
            ));
        }
        if options.address.ip().is_unspecified() {
            return Err(format!(
                "this store is configured to offer {}, which no osd can connect to; \
                 configure the address at which the osd reaches the store",
                options.address
            ));
        }
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(host) = host.as_ref().filter(|host| host.is_running()) {
            return Ok(Arc::clone(host));
        }
        // The failed host must free its address before a new host can listen on it.
        *host = None;
        let started = OfiHost::start(options.clone()).map_err(|e| {
            let address = options.address;
            format!("this store cannot offer memory by libfabric's provider {provider} at {address}: {e}")
        })?;
        let started = Arc::new(started);
        *host = Some(Arc::clone(&started));
        Ok(started)
    }
}
