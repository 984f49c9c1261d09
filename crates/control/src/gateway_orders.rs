//! [`GatewayOrders`]: what a gateway receives from the control plane.

use std::sync::Arc;

use futures::stream;
use tokio::sync::{Mutex, mpsc};
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use wire::{DiskReply, DiskRequest, Error};

use crate::client::{ControlError, error_of};
use crate::gateways::{ORDERS_MAX, RESULT_BYTES_MAX};
use crate::proto::gateway_report::Report;
use crate::proto::gateways_client::GatewaysClient;
use crate::proto::order_done::Outcome;
use crate::proto::{GatewayHello, GatewayOrder, GatewayReport, OrderDone};

/// Maximum size of a part of a result, in bytes. With its head, it fits into a request of the control plane.
const PART_BYTES_MAX: usize = 48 << 10;

/// The stream of orders of a gateway. Dropping it, and all clones of its [`GatewayAnswers`], disconnects the
/// gateway.
#[derive(Debug)]
pub struct GatewayOrders {
    endpoint: String,
    orders: Streaming<GatewayOrder>,
    answers: GatewayAnswers,
    /// Keeps the connection open.
    _channel: Channel,
}

/// Sends the results of orders. Any task may use it.
#[derive(Debug, Clone)]
pub struct GatewayAnswers {
    /// The lock keeps the parts of a result together.
    reports: Arc<Mutex<mpsc::Sender<GatewayReport>>>,
}

impl GatewayOrders {
    /// Begins to serve as the gateway `name`.
    pub(crate) async fn begin(channel: Channel, endpoint: &str, name: &str) -> Result<GatewayOrders, Status> {
        let (reports, sent) = mpsc::channel(ORDERS_MAX);
        let hello = GatewayReport { report: Some(Report::Hello(GatewayHello { name: name.to_owned() })) };
        reports.try_send(hello).expect("an empty queue takes a report");
        let sent = stream::unfold(sent, |mut sent: mpsc::Receiver<GatewayReport>| async {
            let next = sent.recv().await?;
            Some((next, sent))
        });
        let orders = GatewaysClient::new(channel.clone()).serve(sent).await?.into_inner();
        let answers = GatewayAnswers { reports: Arc::new(Mutex::new(reports)) };
        Ok(GatewayOrders { endpoint: endpoint.to_owned(), orders, answers, _channel: channel })
    }

    /// Receives the next order: its id, and the request to execute. The future may be dropped without the
    /// loss of an order. The method answers a request that this version does not know with an error, and
    /// waits for the next order.
    ///
    /// # Errors
    /// When the stream has ended. [`ControlError::Refused`] if the node has ended it: another gateway has
    /// taken the name, or the user has lost the right to serve. Otherwise the gateway may connect again.
    pub async fn next(&mut self) -> Result<(u64, DiskRequest), ControlError> {
        loop {
            let received = self.orders.message().await;
            let received = received.map_err(|status| error_of(&self.endpoint, &status))?;
            let Some(GatewayOrder { id, json }) = received else {
                let reason = "the node has ended the connection".to_owned();
                return Err(ControlError::Unreachable { endpoint: self.endpoint.clone(), reason });
            };
            match serde_json::from_str(&json) {
                Ok(request) => return Ok((id, request)),
                Err(e) => {
                    let why = format!("the gateway does not know the command: {e}");
                    self.answers.done(id, Err(Error::BadRequest(why))).await;
                }
            }
        }
    }

    /// Returns the sender of the results.
    #[must_use]
    pub fn answers(&self) -> GatewayAnswers {
        self.answers.clone()
    }

    /// Sends the result of an order. See [`GatewayAnswers::done`].
    pub async fn done(&self, id: u64, result: wire::Result<DiskReply>) {
        self.answers.done(id, result).await;
    }
}

impl GatewayAnswers {
    /// Sends the result of an order. Each order has one result. The future must not be dropped before it
    /// completes. If the stream has ended, the result is lost; [`GatewayOrders::next`] then fails.
    pub async fn done(&self, id: u64, result: wire::Result<DiskReply>) {
        let result = result.map(|reply| json(&reply)).and_then(|json| match json.len() {
            size if size > RESULT_BYTES_MAX => Err(Error::TooLarge {
                what: "the size of the gateway's answer".into(),
                size: size as u64,
                limit: RESULT_BYTES_MAX as u64,
            }),
            _ => Ok(json),
        });
        let reports = self.reports.lock().await;
        let send = async |outcome: Outcome, continues: bool| {
            let done = OrderDone { order: id, outcome: Some(outcome), continues };
            // `next` tells the end of the stream.
            let _ = reports.send(GatewayReport { report: Some(Report::Done(done)) }).await;
        };
        match result {
            Ok(json) => {
                let mut parts = json.chunks(PART_BYTES_MAX).peekable();
                while let Some(part) = parts.next() {
                    send(Outcome::Result(part.to_vec()), parts.peek().is_some()).await;
                }
            }
            Err(e) => {
                let mut error = json(&e);
                if error.len() > PART_BYTES_MAX {
                    error = json(&Error::CommandRefused("the reason is too long to be sent".into()));
                }
                send(Outcome::Error(error), false).await;
            }
        }
    }
}

fn json<T: serde::Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data has a JSON form")
}
