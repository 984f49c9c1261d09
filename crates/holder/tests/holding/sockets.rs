//! The files of the holder's sockets.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use holder::{ClientError, Framing, Holder, HolderConfig, HolderError, HolderRefusal, SocketFileError};

use crate::support::TestHolder;

#[tokio::test]
async fn sockets_are_private_and_are_removed_when_the_holder_stops() {
    let holder = TestHolder::start();
    let mut gateway = holder.gateway_with(&["d"]).await;
    let mode = |path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(holder.control().parent().unwrap().to_owned()), 0o700);
    assert_eq!((mode(holder.control()), mode(holder.socket("d"))), (0o600, 0o600));
    let front_end = holder.front_end("d");
    gateway.connected().await;
    let dir = holder.stop();
    front_end.expect_end();
    assert!(!dir.path().join("d").exists() && !dir.path().join("holder/control").exists());
    assert!(matches!(gateway.events.next().await, Err(ClientError::Lost(_))));
}

#[tokio::test]
async fn the_socket_of_a_killed_holder_is_replaced_and_others_are_not() {
    let holder = TestHolder::start();
    let gateway = holder.gateway().await;
    let add = |name: &str, path: &std::path::Path| gateway.client.add(name, path, Framing::VHOST_USER);
    drop(UnixListener::bind(holder.socket("stale")).unwrap());
    add("stale", &holder.socket("stale")).await.unwrap();
    holder.front_end("stale");
    let used = holder.socket("used");
    let _listener = UnixListener::bind(&used).unwrap();
    std::fs::write(holder.socket("file"), "data").unwrap();
    let text = |name: &str| holder.socket(name).to_str().unwrap().to_owned();
    for (path, expected) in [
        ("used", SocketFileError::InUse(text("used"))),
        ("stale", SocketFileError::InUse(text("stale"))),
        ("file", SocketFileError::NotASocket(text("file"))),
    ] {
        let refused = add("d", &holder.socket(path)).await.unwrap_err();
        assert_eq!(refused, ClientError::Refused(HolderRefusal::Socket(expected)));
    }
    assert_eq!(std::fs::read(holder.socket("file")).unwrap(), b"data");
    assert!(used.exists());
    let refused = add("d", std::path::Path::new("relative")).await.unwrap_err();
    assert_eq!(
        refused,
        ClientError::Refused(HolderRefusal::Socket(SocketFileError::BadPath("relative".into())))
    );
}

#[tokio::test]
async fn a_second_holder_and_an_exposed_directory_are_refused() {
    let holder = TestHolder::start();
    let second = Holder::bind(HolderConfig::new(holder.control())).unwrap_err();
    assert!(matches!(second, HolderError::Socket(SocketFileError::InUse(_))), "{second}");
    // The first holder is not disturbed.
    drop(holder.gateway().await);
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let exposed = Holder::bind(HolderConfig::new(dir.path().join("control"))).unwrap_err();
    assert!(matches!(exposed, HolderError::Exposed { mode: 0o755, .. }), "{exposed}");
}
