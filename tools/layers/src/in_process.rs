//! An osd in this process, and its clients.

use std::sync::Arc;

use client::engine::InProcess;
use client::{ControlWay, Options};
use identity::Caller;
use osd::OsdServer;

/// Returns the options of the osd's clients.
pub fn options(osd: &OsdServer) -> Options {
    let administrator = osd.administrator().clone();
    let administer =
        move |request, is_repeated| administrator.administer(Caller::process(), request, is_repeated);
    Options { control: Some(ControlWay(Arc::new(InProcess(administer)))), ..Options::default() }
}
