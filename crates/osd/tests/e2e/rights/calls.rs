//! The calls of the control plane, by every kind of caller.

use std::collections::BTreeSet;

use control::{ControlClient, ControlError};
use identity::{IdentityError, Trust};
use prost::Message;
use prost_types::FileDescriptorProto;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};
use tonic_reflection::pb::v1alpha;
use wire::AccountRequest::{
    CreateTenant, CreateUser, Grant, ListTenants, ListUsers, RemoveTenant, RemoveUser, Revoke,
};
use wire::{
    AdminReply, AdminRequest, DiskCommand, DiskRequest, Error, FrontEnd, Redundancy, SessionId, Verbs,
};

use super::World;
use super::table::{Answers, CALLERS, Table, unexpected};

/// A call of the control plane.
enum Call {
    /// A call of one of Outboard's own services.
    Administer(AdminRequest),
    /// `Check` of the health service.
    Check,
    /// `Watch` of the health service, up to the first message.
    Watch,
    /// `ServerReflectionInfo`: lists the services.
    Reflect,
    /// `Serve` of the service of gateways, up to the acceptance.
    Serve,
}

impl Call {
    /// Returns the name of the row. A new request of an operator does not compile without its row.
    fn row(&self) -> &'static str {
        let request = match self {
            Call::Check => return "Health.Check",
            Call::Watch => return "Health.Watch",
            Call::Reflect => return "ServerReflection.ServerReflectionInfo",
            Call::Serve => return "Serve",
            Call::Administer(request) => request,
        };
        match request {
            AdminRequest::Disk(request) => match request.command {
                DiskCommand::Create { .. } => "CreateDisk",
                DiskCommand::List => "ListDisks",
                DiskCommand::Stat { .. } => "GetDisk",
                DiskCommand::Remove { .. } => "RemoveDisk",
                DiskCommand::Resize { .. } => "ResizeDisk",
                DiskCommand::Snapshot { .. } => "SnapshotDisk",
                DiskCommand::RemoveSnapshot { .. } => "RemoveSnapshot",
                DiskCommand::Clone { .. } => "CloneSnapshot",
                DiskCommand::Flatten { .. } => "FlattenDisk",
                DiskCommand::Usage { .. } => "GetDiskUsage",
                DiskCommand::Attach { .. } => "AttachDisk",
                DiskCommand::Detach { .. } => "DetachDisk",
                _ => panic!("{request:?} has no row"),
            },
            AdminRequest::ServeGateway { .. } => "Serve",
            AdminRequest::PoolCreate { .. } => "CreatePool",
            AdminRequest::PoolList { tenant: None } => "ListPools",
            AdminRequest::PoolList { .. } => "ListPools of the tenant",
            AdminRequest::PoolRemove { .. } => "RemovePool",
            AdminRequest::Scrub { .. } => "ScrubPool",
            AdminRequest::TargetSetOut { .. } => "SetTargetOut",
            AdminRequest::TargetReplace { .. } => "ReplaceTarget",
            AdminRequest::TargetForget { .. } => "ForgetTarget",
            AdminRequest::SetRebuildRate(_) => "SetRebuildRate",
            AdminRequest::SetCodingMode(_) => "SetCodingMode",
            AdminRequest::Status => "GetStatus",
            AdminRequest::Usage => "GetUsage",
            AdminRequest::CollectOrphans { .. } => "CollectOrphans",
            AdminRequest::IssueCapability { grants: None, .. } => "IssueCapability",
            AdminRequest::IssueCapability { .. } => "IssueCapability with all rights",
            AdminRequest::WhoAmI => "GetCaller",
            AdminRequest::ListSessions => "ListSessions",
            AdminRequest::KillSession(_) => "KillSession",
            AdminRequest::Audit { .. } => "GetAudit",
            AdminRequest::ArmFault(_) => "ArmFault",
            AdminRequest::ListFaults => "ListFaults",
            AdminRequest::ClearFaults => "ClearFaults",
            AdminRequest::TuneChannel(_) => "TuneChannel",
            AdminRequest::Accounts(request) => match request {
                CreateTenant { .. } => "CreateTenant",
                ListTenants => "ListTenants",
                RemoveTenant { .. } => "RemoveTenant",
                CreateUser { is_node_admin: true, .. } => "CreateUser who administers the node",
                CreateUser { .. } => "CreateUser",
                ListUsers { .. } => "ListUsers",
                RemoveUser { .. } => "RemoveUser",
                Grant { .. } => "GrantRights",
                Revoke { .. } => "RevokeRights",
            },
        }
    }
}

/// Returns all calls of the table. None of them changes what another call sees: where the right
/// suffices, there is another reason for a refusal, or the change does nothing.
fn calls() -> Vec<Call> {
    let redundancy = Redundancy::Single;
    let tenant = || Some("films".to_owned());
    let user = |name: &str| name.parse::<wire::AccountName>().unwrap();
    let missing = || user("films/nobody");
    let all = || wire::AccessGrant { scope: wire::Scope::ALL, verbs: Verbs::ALL };
    let accounts = AdminRequest::Accounts;
    let requests = [
        AdminRequest::PoolCreate { name: "p".into(), pg_count: 1, redundancy, tenant: tenant() },
        AdminRequest::PoolList { tenant: None },
        AdminRequest::PoolList { tenant: tenant() },
        AdminRequest::Scrub { pool: "p".into(), start: false, repair: false, tenant: tenant() },
        AdminRequest::TargetSetOut { index: 99, out: true },
        AdminRequest::TargetReplace { index: 99, uuid: uuid::Uuid::nil() },
        AdminRequest::TargetForget { index: 99, accept_loss: false },
        AdminRequest::SetRebuildRate(0),
        AdminRequest::SetCodingMode("latency-sensitive".parse().unwrap()),
        AdminRequest::Status,
        AdminRequest::Usage,
        AdminRequest::CollectOrphans { older_than_ms: 1 << 40 },
        AdminRequest::IssueCapability { grants: None, key: None, lifetime_s: 0 },
        AdminRequest::IssueCapability { grants: Some(vec![all()]), key: None, lifetime_s: 0 },
        AdminRequest::WhoAmI,
        AdminRequest::ListSessions,
        AdminRequest::KillSession(SessionId(1)),
        AdminRequest::Audit { limit: 1 },
        AdminRequest::ArmFault("dma.transfer=fail".parse().unwrap()),
        AdminRequest::ListFaults,
        AdminRequest::ClearFaults,
        AdminRequest::TuneChannel(wire::TuningChange::default()),
        accounts(CreateTenant { name: "main".into() }),
        accounts(ListTenants),
        accounts(RemoveTenant { name: "main".into() }),
        accounts(CreateUser { user: user("films/other"), key: [1; 32], is_node_admin: false }),
        accounts(CreateUser { user: user("films/other"), key: [1; 32], is_node_admin: true }),
        accounts(ListUsers { tenant: tenant() }),
        accounts(RemoveUser { user: missing() }),
        accounts(Grant { user: missing(), grant: all() }),
        accounts(Revoke { user: missing(), scope: None, verbs: Verbs::ALL }),
        AdminRequest::PoolRemove { name: "victim".into(), force: true, tenant: tenant() },
    ];
    let (disk, snapshot) = (|| "d".to_owned(), || "s".to_owned());
    let disks = [
        DiskCommand::Create { disk: disk(), size: 1 << 20, chunk: 0 },
        DiskCommand::List,
        DiskCommand::Stat { disk: disk() },
        DiskCommand::Remove { disk: disk(), with_snapshots: false },
        DiskCommand::Resize { disk: disk(), size: 1 << 20, shrinks: false },
        DiskCommand::Snapshot { disk: disk(), snapshot: snapshot() },
        DiskCommand::RemoveSnapshot { disk: disk(), snapshot: snapshot() },
        DiskCommand::Clone { disk: disk(), snapshot: snapshot(), clone: "c".into() },
        DiskCommand::Flatten { disk: disk() },
        DiskCommand::Usage { disk: disk() },
        DiskCommand::Attach {
            disk: disk(),
            front_end: FrontEnd::Nbd("/run/nbd.sock".into()),
            gateway: None,
            takes_over: false,
            is_read_only: false,
        },
        DiskCommand::Detach { disk: disk() },
    ];
    let disks = disks.map(|command| AdminRequest::Disk(DiskRequest { pool: "p".into(), command }));
    let mut calls = vec![Call::Check, Call::Watch, Call::Reflect, Call::Serve];
    calls.extend(requests.into_iter().chain(disks).map(Call::Administer));
    calls
}

/// Whether only a caller with the right to a request gets this answer.
fn suffices(request: &AdminRequest, answer: &Result<AdminReply, Error>) -> bool {
    let refusal = |text: &str| matches!(answer, Err(Error::CommandRefused(why)) if why.contains(text));
    let is_done = || *answer == Ok(AdminReply::Done);
    let exists = || matches!(answer, Err(Error::AccountExists(_)));
    let is_missing = || matches!(answer, Err(Error::NoSuchAccount(_)));
    match request {
        AdminRequest::PoolCreate { .. } => *answer == Err(Error::PoolExists("p".into())),
        AdminRequest::PoolList { .. } => matches!(answer, Ok(AdminReply::Pools(_))),
        AdminRequest::PoolRemove { .. } => is_done(),
        AdminRequest::Scrub { .. } => matches!(answer, Ok(AdminReply::Scrub(_))),
        AdminRequest::TargetSetOut { .. }
        | AdminRequest::TargetReplace { .. }
        | AdminRequest::TargetForget { .. } => {
            matches!(answer, Err(Error::OutOfRange { what, .. }) if what == "target")
        }
        AdminRequest::SetRebuildRate(_) | AdminRequest::SetCodingMode(_) => is_done(),
        AdminRequest::Status => matches!(answer, Ok(AdminReply::Status(_))),
        AdminRequest::Usage => matches!(answer, Ok(AdminReply::Usage(_))),
        AdminRequest::CollectOrphans { .. } => matches!(answer, Ok(AdminReply::Collected(0))),
        AdminRequest::IssueCapability { .. } => matches!(answer, Ok(AdminReply::Capability(_))),
        AdminRequest::WhoAmI => matches!(answer, Ok(AdminReply::Me(_))),
        AdminRequest::ListSessions => matches!(answer, Ok(AdminReply::Sessions(_))),
        AdminRequest::KillSession(_) => refusal("there is no session"),
        AdminRequest::Audit { .. } => matches!(answer, Ok(AdminReply::Audit(_))),
        AdminRequest::Disk(_) => refusal("the node has no gateway"),
        AdminRequest::ServeGateway { .. } => matches!(answer, Ok(AdminReply::Gateway(_))),
        AdminRequest::ArmFault(_)
        | AdminRequest::ListFaults
        | AdminRequest::ClearFaults
        | AdminRequest::TuneChannel(_) => refusal("its process has no faults to arm"),
        AdminRequest::Accounts(request) => match request {
            CreateTenant { .. } | CreateUser { .. } => exists(),
            ListTenants => matches!(answer, Ok(AdminReply::Tenants(_))),
            RemoveTenant { .. } => refusal("the tenant main cannot be removed"),
            ListUsers { .. } => matches!(answer, Ok(AdminReply::Users(_))),
            RemoveUser { .. } | Grant { .. } | Revoke { .. } => is_missing(),
        },
    }
}

/// Checks the answer of the health service for the whole node.
fn serving(answer: Option<HealthCheckResponse>) -> Result<(), Status> {
    match answer {
        Some(answer) if answer.status() == ServingStatus::Serving => Ok(()),
        other => Err(Status::internal(format!("the health service answers {other:?}"))),
    }
}

/// Asks the reflection service one question.
async fn reflect(channel: Channel, question: MessageRequest) -> Result<MessageResponse, Status> {
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
    let asked = futures::stream::iter([request]);
    let mut answers = ServerReflectionClient::new(channel).server_reflection_info(asked).await?.into_inner();
    match answers.message().await? {
        Some(ServerReflectionResponse { message_response: Some(answer), .. }) => Ok(answer),
        other => Err(Status::internal(format!("reflection answers {other:?}"))),
    }
}

/// Returns the full names of the services that reflection lists.
async fn services(channel: Channel) -> Result<Vec<String>, Status> {
    match reflect(channel, MessageRequest::ListServices(String::new())).await? {
        MessageResponse::ListServicesResponse(list) => {
            Ok(list.service.into_iter().map(|service| service.name).collect())
        }
        other => Err(Status::internal(format!("reflection answers {other:?}"))),
    }
}

impl World {
    /// Makes a call as the caller of a column. Returns the answer for the cell.
    async fn answer(&self, column: &str, call: &Call) -> String {
        let trust = self.caller(column);
        let client = ControlClient::new(trust.clone());
        let serve = AdminRequest::ServeGateway { name: "g".into() };
        let request = match call {
            Call::Administer(request) => request,
            Call::Serve => &serve,
            call => {
                let channel = match client.channel(&self.control_endpoint()).await {
                    Ok(channel) => channel,
                    Err(e) => return self.call_refusal(column, &trust, &e),
                };
                let whole_node = HealthCheckRequest::default();
                let mut health = HealthClient::new(channel.clone());
                let called = match call {
                    Call::Check => match health.check(whole_node).await {
                        Ok(answer) => serving(Some(answer.into_inner())),
                        Err(status) => Err(status),
                    },
                    Call::Watch => match health.watch(whole_node).await {
                        Ok(answers) => answers.into_inner().message().await.and_then(serving),
                        Err(status) => Err(status),
                    },
                    Call::Reflect | Call::Serve | Call::Administer(_) => services(channel).await.map(drop),
                };
                return match called {
                    Ok(()) => "yes".into(),
                    Err(status) if status.code() == Code::Unauthenticated => {
                        let e = ControlError::NotPermitted(status.message().to_owned());
                        self.call_refusal(column, &trust, &e)
                    }
                    Err(status) => unexpected(&status),
                };
            }
        };
        let endpoint = self.control_endpoint();
        let answered = match request {
            // The number of the tenant stays in the node.
            AdminRequest::ServeGateway { name } => {
                client.serve_gateway(&endpoint, name).await.map(|_| AdminReply::Gateway(0))
            }
            request => client.administer(&endpoint, request.clone(), false).await,
        };
        let answer = match answered {
            Ok(reply) => Ok(reply),
            Err(ControlError::Refused(e)) => Err(e),
            Err(e) => return self.call_refusal(column, &trust, &e),
        };
        let caller = World::user_of(column);
        match &answer {
            answer if suffices(request, answer) => "yes".into(),
            Err(Error::NotPermitted { user, .. } | Error::NotAdministrator { user, .. })
                if user == caller =>
            {
                "no".into()
            }
            Err(Error::NoSuchPool(pool)) if pool == "p" => "absent".into(),
            other => unexpected(other),
        }
    }

    /// Returns the answer for the cell of a caller whose call did not reach a service.
    fn call_refusal(&self, column: &str, trust: &Trust, e: &ControlError) -> String {
        let is_meant = match e {
            ControlError::NotPermitted(why) => {
                let expected = format!("the node refuses the key {}: it is unknown", trust.key());
                matches!(column, "no credential" | "revoked") && why.starts_with(&expected)
            }
            ControlError::Identity(IdentityError::OtherServer { expected, found }) => {
                column == "another node's"
                    && Some(*expected) == trust.server_key()
                    && *found == self.identity.key()
            }
            _ => false,
        };
        if is_meant { "refused".into() } else { unexpected(e) }
    }

    /// Returns a connection to the control plane as the caller of a column.
    async fn channel(&self, column: &str) -> Channel {
        ControlClient::new(self.caller(column)).channel(&self.control_endpoint()).await.unwrap()
    }
}

/// Makes every call as every caller. Returns the differences from the table.
pub(super) async fn wrong_calls() -> Vec<String> {
    let world = World::start().await;
    world.remove("films/gone").await;
    let mut found = Answers::default();
    for mut call in calls() {
        for (number, column) in CALLERS.into_iter().enumerate() {
            if let Call::Administer(AdminRequest::PoolRemove { name, tenant, .. }) = &mut call {
                // Each caller has a pool of its own to remove.
                *name = format!("victim-{number}").into();
                let (name, tenant, redundancy) = (name.clone(), tenant.clone(), Redundancy::Single);
                world.order(AdminRequest::PoolCreate { name, pg_count: 1, redundancy, tenant }).await;
            }
            found.add(call.row().into(), column, world.answer(column, &call).await);
        }
    }
    Table::read("call").differences(&found)
}

#[tokio::test]
async fn every_call_of_the_control_plane_gets_the_answer_of_the_table() {
    assert_eq!(wrong_calls().await, Vec::<String>::new());
}

/// Asks reflection for the methods of all services. The names of methods of Outboard's own services
/// are unique; before the names of other methods are the names of their services.
#[tokio::test]
async fn every_call_that_the_node_lists_has_a_row_and_every_row_a_call() {
    let world = World::start().await;
    let channel = world.channel("owner").await;
    let (mut listed, mut count) = (BTreeSet::new(), 0);
    for service in services(channel.clone()).await.unwrap() {
        let question = MessageRequest::FileContainingSymbol(service.clone());
        let files = match reflect(channel.clone(), question).await.unwrap() {
            MessageResponse::FileDescriptorResponse(files) => files.file_descriptor_proto,
            other => panic!("{service}: {other:?}"),
        };
        let files = files.iter().map(|file| FileDescriptorProto::decode(&**file).unwrap());
        let (package, name) = service.rsplit_once('.').unwrap();
        let in_package: Vec<_> = files.filter(|file| file.package() == package).collect();
        let described =
            in_package.iter().flat_map(|file| &file.service).find(|service| service.name() == name);
        for method in &described.unwrap().method {
            let method = method.name();
            let is_own = package.starts_with("outboard.");
            listed.insert(if is_own { method.to_owned() } else { format!("{name}.{method}") });
            count += 1;
        }
    }
    assert_eq!(listed.len(), count, "two methods have the same name");
    assert_eq!(Table::read("call").names(), listed);
}

#[tokio::test]
async fn a_client_with_an_unknown_key_does_not_learn_which_services_exist() {
    let world = World::start().await;
    for (column, expected) in [("no credential", Code::Unauthenticated), ("owner", Code::Unimplemented)] {
        // The node serves only version 1 of reflection.
        let request = v1alpha::ServerReflectionRequest { host: String::new(), message_request: None };
        let channel = world.channel(column).await;
        let mut missing = v1alpha::server_reflection_client::ServerReflectionClient::new(channel);
        let refused = missing.server_reflection_info(futures::stream::iter([request])).await.unwrap_err();
        assert_eq!(refused.code(), expected, "{column}: {refused}");
    }
}
