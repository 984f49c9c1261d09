//! [`GatewayRegistry`]: the gateways that are connected to the control plane, and the orders that they
//! execute. It performs no I/O: the service `Gateways` moves the messages.
//!
//! An order stays in flight until the gateway reports its result, the time limit has passed or the gateway
//! disconnects, even if nobody waits for the result any more: the gateway still works on it.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::BoxFuture;
use base::collections::HashMap;
use base::watch;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tonic::Status;
use wire::{DiskCommand, DiskReply, DiskRequest, Error, Result};

use crate::proto::order_done::Outcome;
use crate::proto::{GatewayOrder, OrderDone};
use crate::refusal::status_of;

/// Maximum number of gateways.
const GATEWAYS_MAX: usize = 256;

/// Maximum number of gateways of a tenant.
const GATEWAYS_PER_TENANT: usize = 64;

/// Maximum number of orders in flight of a gateway.
pub(crate) const ORDERS_MAX: usize = 64;

/// Time limit of a request, for all gateways that it reaches.
const ORDER_TIME: Duration = Duration::from_secs(60);

/// Maximum size of a result in JSON form, in bytes.
pub(crate) const RESULT_BYTES_MAX: usize = 2 << 20;

/// Number of a tenant, and name of a gateway.
type GatewayKey = (u32, String);

/// The orders of a gateway's stream. An error is the last element.
pub(crate) type Orders = mpsc::Receiver<std::result::Result<GatewayOrder, Status>>;

/// The gateways that are connected to a control plane. Clones share them. Any thread may use it.
#[derive(Debug, Clone, Default)]
pub struct GatewayRegistry(Arc<Mutex<BTreeMap<GatewayKey, Arc<GatewayLine>>>>);

impl GatewayRegistry {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<GatewayKey, Arc<GatewayLine>>> {
        // No code panics while it holds the mutex.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes a request on a gateway of a tenant. The tenant's gateways get the request in the order of
    /// their names, until one does not answer [`DiskReply::NotHere`]. An attachment goes to the gateway that
    /// it names. The gateway executes the request even if the returned future is dropped.
    ///
    /// # Errors
    /// The gateway's refusal. [`Error::CommandRefused`] if no suitable gateway is connected, and
    /// [`Error::Busy`] if it has 64 orders in flight. If the gateway disconnects or does not answer within
    /// 60 s: [`Error::OutcomeUnknown`] for a change, and [`Error::Unavailable`] for another command.
    pub fn execute(&self, tenant: u32, request: DiskRequest) -> BoxFuture<'static, Result<DiskReply>> {
        let chosen = self.choose(tenant, &request.command);
        Box::pin(async move {
            let deadline = Instant::now() + ORDER_TIME;
            for line in chosen? {
                match line.execute(&request, deadline).await {
                    Ok(DiskReply::NotHere) => {}
                    answer => return answer,
                }
            }
            let disk = request.command.disk().unwrap_or_default();
            Err(Error::CommandRefused(format!(
                "the disk \"{disk}\" is attached to a gateway that is not connected to the node; start that \
                 gateway, or attach the disk to another gateway with --force"
            )))
        })
    }

    /// Returns the gateways that may execute a command, in the order in which they get it.
    fn choose(&self, tenant: u32, command: &DiskCommand) -> Result<Vec<Arc<GatewayLine>>> {
        let mut lines: Vec<Arc<GatewayLine>> = {
            let table = self.lock();
            of_tenant(&table, tenant).cloned().collect()
        };
        if lines.is_empty() {
            let why = "no gateway serves the tenant; start one with `outboard gateway`";
            return Err(Error::CommandRefused(why.into()));
        }
        if let DiskCommand::Attach { gateway, .. } = command {
            let names: Vec<&str> = lines.iter().map(|line| &*line.name).collect();
            let names = names.join(", ");
            match gateway {
                Some(name) => {
                    lines.retain(|line| line.name == *name);
                    if lines.is_empty() {
                        return Err(Error::CommandRefused(format!(
                            "the gateway \"{name}\" is not connected; start it, or name one of these: {names}"
                        )));
                    }
                }
                None if lines.len() > 1 => {
                    let why = format!("the tenant has several gateways; name one of them: {names}");
                    return Err(Error::CommandRefused(why));
                }
                None => {}
            }
        }
        Ok(lines)
    }

    /// Registers a gateway. A gateway of the tenant with the same name loses its connection.
    ///
    /// # Errors
    /// [`Error::Busy`] if there are too many gateways.
    pub(crate) fn connect(&self, tenant: u32, name: &str) -> Result<(GatewayConnection, Orders)> {
        let key = (tenant, name.to_owned());
        let mut table = self.lock();
        if !table.contains_key(&key) {
            let of_tenant = of_tenant(&table, tenant).count();
            let limit = match () {
                () if of_tenant >= GATEWAYS_PER_TENANT => Some(("gateways of a tenant", GATEWAYS_PER_TENANT)),
                () if table.len() >= GATEWAYS_MAX => Some(("gateways", GATEWAYS_MAX)),
                () => None,
            };
            if let Some((what, limit)) = limit {
                let (what, limit) = (what.to_owned(), limit as u64);
                return Err(Error::Busy { what, limit, advice: "stop gateways that have no disks".into() });
            }
        }
        let (line, orders) = GatewayLine::new(name);
        let line = Arc::new(line);
        let replaced = table.insert(key.clone(), Arc::clone(&line));
        drop(table);
        if let Some(replaced) = replaced {
            let why = format!(
                "another gateway with the name \"{name}\" has connected; give each gateway a name of its own"
            );
            replaced.close(Some(status_of(&Error::CommandRefused(why))));
        }
        Ok((GatewayConnection { registry: self.clone(), key, line }, orders))
    }
}

fn of_tenant(
    table: &BTreeMap<GatewayKey, Arc<GatewayLine>>,
    tenant: u32,
) -> impl Iterator<Item = &Arc<GatewayLine>> {
    let from = Bound::Included((tenant, String::new()));
    table.range((from, Bound::Unbounded)).take_while(move |((of, _), _)| *of == tenant).map(|(_, line)| line)
}

/// The connection of a registered gateway. Dropping it removes the gateway, and its orders in flight fail.
#[derive(Debug)]
pub(crate) struct GatewayConnection {
    registry: GatewayRegistry,
    key: GatewayKey,
    line: Arc<GatewayLine>,
}

impl GatewayConnection {
    /// Accepts a report of the gateway.
    ///
    /// # Errors
    /// [`Error::BadRequest`] or [`Error::TooLarge`] if the report is invalid. The connection must end.
    pub(crate) fn report(&self, done: OrderDone) -> Result<()> {
        self.line.report(done)
    }

    /// Waits until another gateway takes the name.
    pub(crate) async fn replaced(&self) {
        // The sender exists as long as `self`.
        drop(self.line.is_closed.subscribe().wait_for(|is_closed| *is_closed).await);
    }

    /// Ends the stream of the gateway; `why` is its last element.
    pub(crate) fn close(self, why: Option<Status>) {
        self.end(why);
    }

    fn end(&self, why: Option<Status>) {
        let mut table = self.registry.lock();
        if table.get(&self.key).is_some_and(|line| Arc::ptr_eq(line, &self.line)) {
            table.remove(&self.key);
        }
        drop(table);
        self.line.close(why);
    }
}

impl Drop for GatewayConnection {
    fn drop(&mut self) {
        self.end(None);
    }
}

/// The way to a gateway.
#[derive(Debug)]
struct GatewayLine {
    name: String,
    is_closed: watch::Sender<bool>,
    state: Mutex<LineState>,
}

#[derive(Debug)]
struct LineState {
    /// Id of the last order.
    last: u64,
    /// The orders in flight, at most [`ORDERS_MAX`].
    in_flight: HashMap<u64, OrderInFlight>,
    /// The parts so far of a result, with the order.
    parts: Option<(u64, Vec<u8>)>,
    /// The stream of the gateway; `None` after its end.
    orders: Option<mpsc::Sender<std::result::Result<GatewayOrder, Status>>>,
}

#[derive(Debug)]
struct OrderInFlight {
    answer: oneshot::Sender<Result<DiskReply>>,
    deadline: Instant,
}

impl GatewayLine {
    fn new(name: &str) -> (GatewayLine, Orders) {
        let (sender, orders) = mpsc::channel(ORDERS_MAX);
        let state = LineState { last: 0, in_flight: HashMap::default(), parts: None, orders: Some(sender) };
        let line = GatewayLine {
            name: name.to_owned(),
            is_closed: watch::Sender::new(false),
            state: Mutex::new(state),
        };
        (line, orders)
    }

    fn lock(&self) -> MutexGuard<'_, LineState> {
        // No code panics while it holds the mutex.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn execute(&self, request: &DiskRequest, deadline: Instant) -> Result<DiskReply> {
        let (order, answer) = self.begin(request, deadline)?;
        let failed = match tokio::time::timeout_at(deadline, answer).await {
            Ok(Ok(result)) => return result,
            Ok(Err(_)) => format!("the gateway \"{}\" has disconnected before it answered", self.name),
            Err(_) => {
                self.lock().in_flight.remove(&order);
                format!("the gateway \"{}\" has not answered within {} s", self.name, ORDER_TIME.as_secs())
            }
        };
        Err(match request.command.is_change() {
            true => Error::OutcomeUnknown(failed),
            false => Error::Unavailable(failed),
        })
    }

    /// Sends an order. Returns its id, and the receiver of its result.
    fn begin(
        &self,
        request: &DiskRequest,
        deadline: Instant,
    ) -> Result<(u64, oneshot::Receiver<Result<DiskReply>>)> {
        let mut state = self.lock();
        let LineState { last, in_flight, orders, .. } = &mut *state;
        let gone = || Error::Unavailable(format!("the gateway \"{}\" has disconnected", self.name));
        let busy = || Error::Busy {
            what: format!("commands for the gateway \"{}\"", self.name),
            limit: ORDERS_MAX as u64,
            advice: "wait for the answers to earlier ones".into(),
        };
        let orders = orders.as_ref().ok_or_else(gone)?;
        if in_flight.len() >= ORDERS_MAX {
            let now = Instant::now();
            in_flight.retain(|_, order| order.deadline > now);
            if in_flight.len() >= ORDERS_MAX {
                return Err(busy());
            }
        }
        *last += 1;
        let json = serde_json::to_string(request).expect("plain data has a JSON form");
        orders.try_send(Ok(GatewayOrder { id: *last, json })).map_err(|e| match e {
            // The gateway does not read.
            TrySendError::Full(_) => busy(),
            TrySendError::Closed(_) => gone(),
        })?;
        let (answer, answered) = oneshot::channel();
        in_flight.insert(*last, OrderInFlight { answer, deadline });
        assert!(in_flight.len() <= ORDERS_MAX, "more orders in flight than the limit");
        Ok((*last, answered))
    }

    fn report(&self, done: OrderDone) -> Result<()> {
        let OrderDone { order, outcome, continues } = done;
        let bad = |why: String| Error::BadRequest(format!("report about order {order}: {why}"));
        let mut state = self.lock();
        if order == 0 || order > state.last {
            return Err(bad("the order does not exist".into()));
        }
        let mut whole = match state.parts.take() {
            Some((of, parts)) if of == order => parts,
            Some((of, _)) => return Err(bad(format!("the result of order {of} is incomplete"))),
            None => Vec::new(),
        };
        let result = match outcome {
            Some(Outcome::Result(part)) => {
                let size = whole.len() + part.len();
                if size > RESULT_BYTES_MAX {
                    let (size, limit) = (size as u64, RESULT_BYTES_MAX as u64);
                    return Err(Error::TooLarge { what: "the result of an order".into(), size, limit });
                }
                whole.extend_from_slice(&part);
                if continues {
                    state.parts = Some((order, whole));
                    return Ok(());
                }
                Ok(serde_json::from_slice(&whole).map_err(|e| bad(e.to_string()))?)
            }
            Some(Outcome::Error(json)) if whole.is_empty() && !continues => {
                Err(serde_json::from_slice(&json).map_err(|e| bad(e.to_string()))?)
            }
            Some(Outcome::Error(_)) => return Err(bad("an error has one part".into())),
            None => return Err(bad("it has no result".into())),
        };
        // The order may have run out of time.
        if let Some(waiting) = state.in_flight.remove(&order) {
            // The caller may have been cancelled; ignore the error.
            let _ = waiting.answer.send(result);
        }
        Ok(())
    }

    /// Ends the stream of the gateway, and fails its orders in flight.
    fn close(&self, why: Option<Status>) {
        let mut state = self.lock();
        if let (Some(orders), Some(why)) = (state.orders.take(), why) {
            // A gateway that does not read does not learn the reason.
            let _ = orders.try_send(Err(why));
        }
        state.in_flight.clear();
        state.parts = None;
        drop(state);
        self.is_closed.send_replace(true);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use wire::FrontEnd;

    use super::*;

    fn request(command: DiskCommand) -> DiskRequest {
        DiskRequest { pool: "p".into(), command }
    }

    fn detach() -> DiskRequest {
        request(DiskCommand::Detach { disk: "d".into() })
    }

    fn attach(gateway: Option<&str>) -> DiskRequest {
        request(DiskCommand::Attach {
            disk: "d".into(),
            front_end: FrontEnd::Nbd("/s".into()),
            gateway: gateway.map(str::to_owned),
            takes_over: false,
            is_read_only: false,
        })
    }

    fn done(order: u64, reply: &DiskReply) -> OrderDone {
        let json = serde_json::to_vec(reply).unwrap();
        OrderDone { order, outcome: Some(Outcome::Result(json)), continues: false }
    }

    fn order(orders: &mut Orders) -> (u64, DiskRequest) {
        let order = orders.try_recv().unwrap().unwrap();
        (order.id, serde_json::from_str(&order.json).unwrap())
    }

    fn refusal(answer: Option<Result<DiskReply>>) -> String {
        match answer {
            Some(Err(Error::CommandRefused(why))) => why,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_command_passes_gateways_that_do_not_have_the_disk() {
        let registry = GatewayRegistry::default();
        let (b, mut of_b) = registry.connect(1, "b").unwrap();
        let (a, mut of_a) = registry.connect(1, "a").unwrap();
        let (_other, mut of_other) = registry.connect(2, "c").unwrap();
        let mut detaching = registry.execute(1, detach());
        assert!((&mut detaching).now_or_never().is_none());
        assert!(of_b.try_recv().is_err(), "the first gateway by name gets the command first");
        assert_eq!(order(&mut of_a), (1, detach()));
        a.report(done(1, &DiskReply::NotHere)).unwrap();
        assert!((&mut detaching).now_or_never().is_none());
        assert_eq!(order(&mut of_b), (1, detach()));
        b.report(done(1, &DiskReply::Done)).unwrap();
        assert_eq!(detaching.await, Ok(DiskReply::Done));
        let mut lost = registry.execute(1, detach());
        assert!((&mut lost).now_or_never().is_none());
        a.report(done(2, &DiskReply::NotHere)).unwrap();
        assert!((&mut lost).now_or_never().is_none());
        b.report(done(2, &DiskReply::NotHere)).unwrap();
        assert!(refusal(lost.now_or_never()).contains("a gateway that is not connected"));
        assert!(of_other.try_recv().is_err(), "another tenant's gateway gets nothing");
    }

    #[tokio::test]
    async fn an_attachment_reaches_only_the_gateway_that_it_names() {
        let registry = GatewayRegistry::default();
        assert!(refusal(registry.execute(1, attach(None)).now_or_never()).contains("no gateway serves"));
        let (_a, mut of_a) = registry.connect(1, "a").unwrap();
        assert!(registry.execute(1, attach(None)).now_or_never().is_none(), "the only gateway");
        assert_eq!(order(&mut of_a), (1, attach(None)));
        let (_b, mut of_b) = registry.connect(1, "b").unwrap();
        assert!(refusal(registry.execute(1, attach(None)).now_or_never()).contains("a, b"));
        assert!(refusal(registry.execute(1, attach(Some("c"))).now_or_never()).contains("a, b"));
        assert!(registry.execute(1, attach(Some("b"))).now_or_never().is_none());
        assert_eq!(order(&mut of_b), (1, attach(Some("b"))));
        assert!(of_a.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_gateway_that_connects_again_replaces_its_older_stream() {
        let registry = GatewayRegistry::default();
        let (old, mut of_old) = registry.connect(1, "a").unwrap();
        let waiting = registry.execute(1, detach());
        let mut waiting = std::pin::pin!(waiting);
        assert!((&mut waiting).now_or_never().is_none());
        order(&mut of_old);
        let (_new, mut of_new) = registry.connect(1, "a").unwrap();
        assert!(matches!(waiting.await, Err(Error::OutcomeUnknown(_))));
        old.replaced().await;
        let ended = of_old.recv().await.unwrap().unwrap_err();
        assert!(ended.message().contains("another gateway with the name"), "{ended:?}");
        assert!(of_old.recv().await.is_none());
        drop(old);
        assert!(registry.execute(1, detach()).now_or_never().is_none());
        assert_eq!(order(&mut of_new).1, detach(), "the end of the old stream leaves the new one");
    }

    #[tokio::test]
    async fn orders_of_a_gateway_that_disconnects_fail() {
        let registry = GatewayRegistry::default();
        for (command, expected) in [
            (detach(), Error::OutcomeUnknown("the gateway \"a\" has disconnected before it answered".into())),
            (
                request(DiskCommand::List),
                Error::Unavailable("the gateway \"a\" has disconnected before it answered".into()),
            ),
        ] {
            let (a, _orders) = registry.connect(1, "a").unwrap();
            let mut waiting = registry.execute(1, command);
            assert!((&mut waiting).now_or_never().is_none());
            drop(a);
            assert_eq!(waiting.await, Err(expected));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_has_a_time_limit_and_its_late_result_is_ignored() {
        let registry = GatewayRegistry::default();
        let (a, mut of_a) = registry.connect(1, "a").unwrap();
        let before = Instant::now();
        let answer = registry.execute(1, detach()).await;
        assert_eq!(before.elapsed().as_secs(), 60);
        assert!(matches!(answer, Err(Error::OutcomeUnknown(_))), "{answer:?}");
        a.report(done(order(&mut of_a).0, &DiskReply::Done)).unwrap();
        let mut next = registry.execute(1, detach());
        assert!((&mut next).now_or_never().is_none());
        a.report(done(2, &DiskReply::Done)).unwrap();
        assert_eq!(next.await, Ok(DiskReply::Done));
    }

    #[tokio::test(start_paused = true)]
    async fn abandoned_orders_count_until_their_time_is_over() {
        let registry = GatewayRegistry::default();
        let (_a, mut of_a) = registry.connect(1, "a").unwrap();
        let mut orders = || {
            for _ in 0..ORDERS_MAX {
                assert!(registry.execute(1, detach()).now_or_never().is_none());
                order(&mut of_a);
            }
        };
        orders();
        let busy = registry.execute(1, detach()).now_or_never();
        assert!(matches!(busy, Some(Err(Error::Busy { limit: 64, .. }))), "{busy:?}");
        tokio::time::advance(ORDER_TIME).await;
        orders();
    }

    #[tokio::test]
    async fn a_gateway_that_does_not_read_gets_no_more_orders_than_the_limit() {
        let registry = GatewayRegistry::default();
        let (a, _orders) = registry.connect(1, "a").unwrap();
        for id in 1..=ORDERS_MAX as u64 {
            let waiting = registry.execute(1, detach());
            let mut waiting = std::pin::pin!(waiting);
            assert!((&mut waiting).now_or_never().is_none());
            a.report(done(id, &DiskReply::Done)).unwrap();
            assert_eq!(waiting.await, Ok(DiskReply::Done));
        }
        let busy = registry.execute(1, detach()).now_or_never();
        assert!(matches!(busy, Some(Err(Error::Busy { .. }))), "{busy:?}");
    }

    #[test]
    fn a_tenant_leaves_gateways_to_other_tenants() {
        let registry = GatewayRegistry::default();
        let mut kept = Vec::new();
        for tenant in 0..4 {
            for number in 0..GATEWAYS_PER_TENANT {
                kept.push(registry.connect(tenant, &format!("g{number}")).unwrap());
            }
            let refused = registry.connect(tenant, "more").map(drop);
            assert!(matches!(refused, Err(Error::Busy { limit: 64, .. })), "{refused:?}");
        }
        let refused = registry.connect(4, "g").map(drop);
        assert!(matches!(refused, Err(Error::Busy { limit: 256, .. })), "{refused:?}");
        let _replacement = registry.connect(0, "g0").unwrap();
        kept.pop();
        registry.connect(4, "g").unwrap();
    }

    #[tokio::test]
    async fn invalid_reports_are_refused_and_a_result_may_have_parts() {
        let registry = GatewayRegistry::default();
        let (a, _orders) = registry.connect(1, "a").unwrap();
        let mut listing = registry.execute(1, request(DiskCommand::List));
        assert!((&mut listing).now_or_never().is_none());
        let mut second = registry.execute(1, request(DiskCommand::List));
        assert!((&mut second).now_or_never().is_none());
        let part = |order, bytes: &[u8], continues| OrderDone {
            order,
            outcome: Some(Outcome::Result(bytes.to_vec())),
            continues,
        };
        let error = |bytes: &[u8], continues| OrderDone {
            order: 1,
            outcome: Some(Outcome::Error(bytes.to_vec())),
            continues,
        };
        for rubbish in [
            done(0, &DiskReply::Done),
            done(3, &DiskReply::Done),
            part(1, b"{", false),
            part(1, b"", false),
            error(b"\"Unknown\"", false),
            error(b"{\"CommandRefused\":\"no\"}", true),
            OrderDone { order: 1, outcome: None, continues: false },
            part(1, &vec![b' '; RESULT_BYTES_MAX + 1], true),
        ] {
            assert!(a.report(rubbish.clone()).is_err(), "{:?}", rubbish.outcome);
        }
        a.report(part(1, b"{\"Dis", true)).unwrap();
        assert!(a.report(part(2, b"\"Done\"", false)).is_err(), "another order between two parts");
        a.report(part(1, b"{\"Dis", true)).unwrap();
        a.report(part(1, b"ks\":[]}", false)).unwrap();
        assert_eq!(listing.await, Ok(DiskReply::Disks(Vec::new())));
        a.report(OrderDone { order: 2, ..error(b"{\"CommandRefused\":\"no\"}", false) }).unwrap();
        assert_eq!(second.await, Err(Error::CommandRefused("no".into())));
    }
}
