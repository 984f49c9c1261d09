//! Host memory for engines that reach it over a network. It is prepared when the first osd asks for
//! it.

use std::cell::RefCell;
use std::rc::Rc;

use base::fault::Faults;
use channel::ofi::{OfiHost, OfiHostOptions};

/// The source of offers. It lives on the server's thread.
pub(super) struct OfiHostSource {
    options: Option<OfiHostOptions>,
    host: RefCell<Option<Rc<OfiHost>>>,
}

impl OfiHostSource {
    /// Creates a source with these options and faults. It offers nothing if `options` is `None`.
    pub(super) fn new(options: Option<OfiHostOptions>, faults: &Faults) -> OfiHostSource {
        let options = options.map(|options| OfiHostOptions { faults: faults.clone(), ..options });
        OfiHostSource { options, host: RefCell::default() }
    }

    /// The host for engines that use `provider`. Call this each time that memory is offered. The
    /// first call loads libfabric and opens the device, which may take a moment. So does the first
    /// call after a failure of the device.
    ///
    /// # Errors
    /// Says why there is no host and what to do. The osd's status shows this text.
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
        // The failed host must free its address first.
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
