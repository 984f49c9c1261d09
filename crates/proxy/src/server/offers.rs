//! Host memory for engines that reach it over a network: made ready when the first osd asks for it.

use std::cell::RefCell;
use std::rc::Rc;

use base::fault::Faults;
use channel::ofi::{OfiHost, OfiHostOptions};

/// What there is to offer. Lives on the server's thread.
pub(super) struct OfiHostSource {
    options: Option<OfiHostOptions>,
    host: RefCell<Option<Rc<OfiHost>>>,
}

impl OfiHostSource {
    /// Offers what `options` say, with these faults; `None` offers nothing.
    pub(super) fn new(options: Option<OfiHostOptions>, faults: &Faults) -> OfiHostSource {
        let options = options.map(|options| OfiHostOptions { faults: faults.clone(), ..options });
        OfiHostSource { options, host: RefCell::default() }
    }

    /// The host for engines that use `provider`, to be asked for each time that memory is offered. The first call loads libfabric
    /// and opens the device, which may take a moment; so does the first one after the device has failed.
    ///
    /// # Errors
    /// Why there is none, and what to do: for whoever reads the osd's status.
    pub(super) fn host(&self, provider: &str) -> Result<Rc<OfiHost>, String> {
        let Some(options) = &self.options else {
            return Err("this store offers no memory by libfabric; give it an address to listen at, or have the osd use the \
                        engine shm"
                .to_owned());
        };
        if options.provider != provider {
            return Err(format!(
                "this store offers libfabric's provider {}, the osd uses {provider}; have both use the same",
                options.provider
            ));
        }
        if options.address.ip().is_unspecified() {
            return Err(format!(
                "this store is to offer {}, which nobody can connect to; give it the address at which the osd reaches it",
                options.address
            ));
        }
        let mut host = self.host.borrow_mut();
        if let Some(host) = host.as_ref().filter(|host| host.is_running()) {
            return Ok(Rc::clone(host));
        }
        // The one that has failed gives its address back first.
        *host = None;
        let started = OfiHost::start(options.clone()).map_err(|e| {
            let address = options.address;
            format!("this store cannot offer memory by libfabric's provider {provider} at {address}: {e}")
        })?;
        let started = Rc::new(started);
        *host = Some(Rc::clone(&started));
        Ok(started)
    }
}
