//! The source address of a client's connections.

use client::Options;
use client::engine::NativeEngine;

use crate::rights::World;

#[tokio::test]
async fn a_client_reaches_the_control_plane_from_its_chosen_address() {
    let world = World::start().await;
    // The network stack of the data path has no chosen address. The capability comes from the control
    // plane.
    let connect = async |source: &str| {
        let source = Some(source.parse().unwrap());
        let options = Options { trust: world.caller("owner"), source, ..Options::default() };
        NativeEngine::connect_over(world.stack("films/owner"), world.endpoint(), &options).await
    };
    connect("127.0.0.2").await.unwrap();
    let refused = connect("192.0.2.1").await.unwrap_err();
    assert!(refused.to_string().contains("cannot connect from 192.0.2.1"), "{refused}");
}
