//! The requests of the data path, by every kind of caller.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use capability::{CapabilityError, CapabilityKey, Claims};
use identity::{IdentityError, ProofKey};
use messenger::MessengerError;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, Visitor};
use wire::AccountRequest::Revoke;
use wire::{
    BulkDescriptor, BulkDirection, BulkOwner, BulkSegment, Condition, Data, Error, List, MemoryKind, Mutate,
    Mutation, ObjectReply, ObjectRequest, OpBytes, Read, ReadFirst, ReplyBody, RequestBody, SessionId, Verbs,
};

use super::table::{Answers, CALLERS, Table, unexpected};
use super::{Line, World, name, opening, query, read, write};

/// Lifetime of the capabilities of the caller "expired", in seconds. The caller opens its sessions
/// in this time.
const SHORT_LIFE_S: u32 = 3;

/// Fabric address of a third party.
const THIRD_PARTY: [u8; 3] = [1, 2, 3];

/// Size of the object `a/large`, in bytes. The osd never sends that much data inside a reply, so it
/// writes to the memory that a read names.
const LARGE: u64 = 1 << 20;

/// Whether the capability of a session names the memory of the third party.
#[derive(Clone, Copy, PartialEq)]
enum Naming {
    Nothing,
    ThirdParty,
}

/// A request, and the sessions on which the callers make it.
struct Case {
    request: RequestBody,
    naming: Naming,
}

/// A connection with an open session and its capability; or, if the node has refused the
/// connection, the answer for all cells of the caller.
type Access = Result<(Line, Bytes), String>;

impl World {
    /// Connects as the caller of a column, and opens a session.
    async fn access(&self, column: &str, naming: Naming) -> Access {
        let trust = self.caller(column);
        if matches!(column, "no credential" | "another node's") {
            let line = self.connect(trust).await.map_err(|e| self.connection_refusal(column, &e))?;
            return Ok((line, Bytes::new()));
        }
        let lifetime_s = if column == "expired" { SHORT_LIFE_S } else { 0 };
        let issued = self.capability(&trust, lifetime_s).await.expect("a capability");
        let capability = if naming == Naming::ThirdParty { naming_third_party(&issued) } else { issued };
        let mut line = self.connect(trust).await.unwrap();
        let opened = line.ask(opening(None, capability.clone())).await;
        assert!(matches!(opened, Ok(ReplyBody::Opened { .. })), "{column}: {opened:?}");
        Ok((line, capability))
    }

    /// Opens a session for each caller. Then takes the rights from the caller "revoked", and waits
    /// until the capability of the caller "expired" is invalid.
    async fn sessions(&self) -> BTreeMap<(&'static str, bool), Access> {
        let mut sessions = BTreeMap::new();
        for column in CALLERS {
            for naming in [Naming::Nothing, Naming::ThirdParty] {
                let access = self.access(column, naming).await;
                sessions.insert((column, naming == Naming::ThirdParty), access);
            }
        }
        let (user, verbs) = ("films/gone".parse().unwrap(), Verbs::ALL);
        self.account(Revoke { user, scope: None, verbs }).await;
        tokio::time::sleep(Duration::from_secs(SHORT_LIFE_S.into())).await;
        sessions
    }

    /// Returns the answer for the cells of a caller that cannot connect.
    fn connection_refusal(&self, column: &str, e: &MessengerError) -> String {
        let is_meant = match e {
            MessengerError::KeyRefused(_) => column == "no credential",
            MessengerError::Identity(IdentityError::OtherServer { found, .. }) => {
                column == "another node's" && *found == self.identity.key()
            }
            _ => false,
        };
        if is_meant { "refused".into() } else { unexpected(e) }
    }
}

/// Returns a capability with the claims of another one that also names the memory of the third
/// party. No call issues capabilities with this claim yet, so the test signs it with the key of the
/// node.
fn naming_third_party(issued: &[u8]) -> Bytes {
    let claims = Claims::unverified(issued).unwrap();
    let claims = Claims { memory: vec![THIRD_PARTY.to_vec()], ..claims };
    // The node has the default key, which is the same in the whole process.
    CapabilityKey::derive(&ProofKey::default()).sign(&claims).unwrap().into()
}

/// Returns a descriptor of memory of the third party.
fn memory(direction: BulkDirection, len: u64) -> BulkDescriptor {
    BulkDescriptor {
        owner: BulkOwner::Fabric(THIRD_PARTY.to_vec()),
        memory: MemoryKind::Host,
        segments: vec![BulkSegment { address: 0, key: 7, len }],
        direction,
        block_offset: 0,
        expires_ms: 0,
        remote: None,
    }
}

/// Returns a read of `a/large` into memory of the third party.
fn read_into_memory() -> RequestBody {
    let sink = Some(memory(BulkDirection::Write, LARGE));
    let (name, part, if_version) = (name("a/large"), None, None);
    ObjectRequest::Read(Read { name, part, offset: 0, len: LARGE, if_version, sink }).into()
}

/// Returns a change of `a/x` with data from memory of the third party.
fn write_from_memory() -> RequestBody {
    let (name, part, conditions) = (name("a/x"), None, vec![]);
    let (ops, data) =
        (vec![Mutation::WriteFull(OpBytes::Payload)], Data::Bulk(memory(BulkDirection::Read, 4096)));
    ObjectRequest::Mutate(Mutate { name, part, conditions, ops, data }).into()
}

fn list(namespace: Option<&'static str>, prefix: &'static str) -> RequestBody {
    ObjectRequest::List(List {
        pool: "p".into(),
        namespace: namespace.map(Bytes::from),
        prefix: prefix.into(),
        group: None,
        cursor: Bytes::new(),
        limit: 10,
        skip_unavailable: false,
    })
    .into()
}

/// Returns a change of an object that may begin as a copy of another one.
fn copy(object: &str, of: &'static str) -> RequestBody {
    let (name, part, conditions) = (name(object), None, vec![]);
    let ops = vec![Mutation::Inherit(vec![of.into()]), Mutation::Touch];
    ObjectRequest::Mutate(Mutate { name, part, conditions, ops, data: Data::None }).into()
}

/// Returns a read of an object, or of another one.
fn read_first(object: &str, other: &'static str) -> RequestBody {
    let name = name(object);
    let read = Read { name, part: None, offset: 0, len: 1, if_version: None, sink: None };
    ObjectRequest::ReadFirst(ReadFirst { read, fallbacks: vec![other.into()] }).into()
}

/// Returns all requests of the table, in the order in which they are made.
fn cases() -> Vec<Case> {
    let same = Condition::Bytes(0, "x".into());
    let matching = [same.clone(), Condition::Xattr("k".into(), None), Condition::Omap("k".into(), None)];
    let mut requests = vec![
        write("a/x", vec![]),
        write("b/x", vec![]),
        write("a/x", vec![same]),
        write("c/x", vec![]),
        read("a/x", None),
        read("b/x", None),
        query("a/x"),
        query("b/x"),
        list(None, ""),
        list(Some(""), ""),
        list(Some(""), "a/"),
        list(Some(""), "a/x"),
        read_into_memory(),
        write_from_memory(),
        copy("a/x", "a/y"),
        copy("a/x", "b/x"),
        read_first("a/x", "a/y"),
        read_first("a/x", "b/x"),
    ];
    requests.extend(matching.map(|condition| write("c/x", vec![condition])));
    requests.extend([
        RequestBody::Renew { capability: Bytes::new() },
        opening(None, Bytes::new()),
        RequestBody::Leave,
        RequestBody::Fence { session: SessionId(0) },
        RequestBody::CloseSession,
    ]);
    let mut cases: Vec<Case> =
        requests.into_iter().map(|request| Case { request, naming: Naming::Nothing }).collect();
    let named = [read_into_memory(), write_from_memory()];
    cases.extend(named.map(|request| Case { request, naming: Naming::ThirdParty }));
    cases
}

impl Case {
    /// Returns the name of the row. A new request does not compile without its row.
    fn row(&self) -> String {
        let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
        let place = |object: &wire::WireName| text(&object.object);
        let whose = match self.naming {
            Naming::Nothing => "memory of a third party",
            Naming::ThirdParty => "memory that the capability names",
        };
        match &self.request {
            RequestBody::Open { .. } => "Open".into(),
            RequestBody::Renew { .. } => "Renew".into(),
            RequestBody::CloseSession => "CloseSession".into(),
            RequestBody::Leave => "Leave".into(),
            RequestBody::Fence { .. } => "Fence".into(),
            RequestBody::Object(request) => match request {
                ObjectRequest::Read(Read { sink: Some(_), .. }) => format!("Read into {whose}"),
                ObjectRequest::Read(read) => format!("Read {}", place(&read.name)),
                ObjectRequest::ReadFirst(ReadFirst { read, fallbacks }) => {
                    format!("ReadFirst {} or else {}", place(&read.name), text(&fallbacks[0]))
                }
                ObjectRequest::Query(query) => format!("Query {}", place(&query.name)),
                ObjectRequest::Mutate(Mutate { data: Data::Bulk(_), .. }) => format!("Mutate from {whose}"),
                ObjectRequest::Mutate(mutate) => {
                    let conditional = if mutate.conditions.is_empty() { "" } else { " if the data matches" };
                    let copied =
                        mutate.inherits_from().map(|from| format!(" as a copy of {}", text(&from[0])));
                    format!("Mutate {}{conditional}{}", place(&mutate.name), copied.unwrap_or_default())
                }
                ObjectRequest::List(list) => {
                    let prefix = String::from_utf8(list.prefix.to_vec()).unwrap();
                    match (&list.namespace, &*prefix) {
                        (None, _) => "List all namespaces".into(),
                        (Some(_), "") => "List the default namespace".into(),
                        (Some(_), prefix) => format!("List {prefix}"),
                    }
                }
            },
        }
    }

    /// Whether the request names memory of the third party.
    fn names_memory(&self) -> bool {
        matches!(
            &self.request,
            RequestBody::Object(
                ObjectRequest::Read(Read { sink: Some(_), .. })
                    | ObjectRequest::Mutate(Mutate { data: Data::Bulk(_), .. })
            )
        )
    }

    /// Returns the verbs that a user without a right to the request may lack.
    fn verbs(&self) -> &'static [&'static str] {
        let RequestBody::Object(request) = &self.request else { return &[] };
        match request {
            ObjectRequest::Read(_) | ObjectRequest::ReadFirst(_) | ObjectRequest::Query(_) => &["read"],
            ObjectRequest::List(_) => &["list"],
            ObjectRequest::Mutate(mutate)
                if mutate.conditions.is_empty() && mutate.inherits_from().is_none() =>
            {
                &["write"]
            }
            ObjectRequest::Mutate(_) => &["write", "read"],
        }
    }

    /// Whether only a caller with the right gets this answer.
    fn suffices(&self, answer: &Result<ReplyBody, Error>) -> bool {
        let object = match &self.request {
            RequestBody::Open { .. } => return matches!(answer, Ok(ReplyBody::Opened { .. })),
            RequestBody::Renew { .. } => return matches!(answer, Ok(ReplyBody::Renewed)),
            RequestBody::CloseSession => return matches!(answer, Ok(ReplyBody::Closed)),
            // Only a client with a valid capability learns that the session is not its own.
            RequestBody::Fence { .. } => return matches!(answer, Err(Error::SessionRefused { .. })),
            // It has no answer.
            RequestBody::Leave => return false,
            RequestBody::Object(object) => object,
        };
        // After the right was checked, the network stack refuses, because it reaches no third
        // party.
        let is_out_of_reach =
            |why: &str| why.contains("memory of a third party, which this stack cannot reach");
        // After the right was checked, the osd refuses, because the names have different placement keys.
        let is_unrelated = |why: &str| why.contains("have different placement keys");
        match (answer, object) {
            (Err(Error::BadRequest(why)), ObjectRequest::ReadFirst(_)) => is_unrelated(why),
            (Err(Error::BadRequest(why)), ObjectRequest::Mutate(mutate)) => {
                mutate.inherits_from().is_some() && is_unrelated(why)
            }
            (Err(Error::TransferFailed(why)), _) => self.names_memory() && is_out_of_reach(why),
            (Ok(ReplyBody::Object(_)), _) if self.names_memory() => false,
            (Ok(ReplyBody::Object(ObjectReply::Mutated(_))), ObjectRequest::Mutate(_))
            | (Ok(ReplyBody::Object(ObjectReply::Queried(_))), ObjectRequest::Query(_))
            | (Ok(ReplyBody::Object(ObjectReply::Read { .. })), ObjectRequest::Read(_))
            | (Ok(ReplyBody::Object(ObjectReply::Listed(_))), ObjectRequest::List(_)) => true,
            _ => false,
        }
    }

    /// Makes the request. Returns the answer for the cell of the caller.
    async fn ask(&self, column: &str, (line, capability): &mut (Line, Bytes)) -> String {
        let capability = capability.clone();
        let request = match self.request.clone() {
            RequestBody::Leave => return line.leave().await.into(),
            RequestBody::Renew { .. } => RequestBody::Renew { capability },
            RequestBody::Open { .. } => opening(None, capability),
            other => other,
        };
        let answer = line.ask(request).await;
        let caller = World::user_of(column);
        let invalid = match column {
            "expired" => Some(CapabilityError::Expired.to_string()),
            "revoked" => Some(CapabilityError::Outdated.to_string()),
            _ => None,
        };
        let word = match &answer {
            answer if self.suffices(answer) => "yes",
            Err(Error::NotPermitted { user, verb, .. })
                if user == caller && self.verbs().contains(&&**verb) =>
            {
                "no"
            }
            Err(Error::NotAdministrator { user, what, .. })
                if user == caller && self.names_memory() && what.contains("memory of a third party") =>
            {
                "no"
            }
            Err(Error::CapabilityRefused { why, .. }) if Some(why) == invalid.as_ref() => "stale",
            Err(Error::NoSuchPool(pool)) if pool == "p" => "absent",
            other => return unexpected(other),
        };
        word.into()
    }
}

impl Line {
    /// Leaves a strand that has no session, which needs no right and has no answer. Waits for the
    /// answer to another request on the connection.
    async fn leave(&mut self) -> &'static str {
        self.send(1, 0, &RequestBody::Leave).await;
        drop(self.ask(query("a/x")).await);
        "yes"
    }
}

/// Makes every request as every caller. Returns the differences from the table.
pub(super) async fn wrong_requests() -> Vec<String> {
    let world = World::start().await;
    let mut sessions = world.sessions().await;
    let Ok((owner, _)) = sessions.get_mut(&("owner", false)).unwrap() else { panic!("the owner connects") };
    let (name, ops) = (name("a/large"), vec![Mutation::Truncate(LARGE)]);
    let large = Mutate { name, part: None, conditions: vec![], ops, data: Data::None };
    owner.ask(ObjectRequest::Mutate(large).into()).await.unwrap();
    let mut found = Answers::default();
    for case in cases() {
        for column in CALLERS {
            let answer = match sessions.get_mut(&(column, case.naming == Naming::ThirdParty)).unwrap() {
                Err(answer) => answer.clone(),
                Ok(session) => case.ask(column, session).await,
            };
            found.add(case.row(), column, answer);
        }
    }
    Table::read("request").differences(&found)
}

#[tokio::test]
async fn every_request_of_the_data_path_gets_the_answer_of_the_table() {
    assert_eq!(wrong_requests().await, Vec::<String>::new());
}

/// Takes the names of an enum's variants from the enum's `Deserialize`, which then fails.
struct VariantNames<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for VariantNames<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = variants;
        Err(Self::Error::custom("only the names are wanted"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Self::Error> {
        Err(Self::Error::custom("the type is no enum"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// Returns the names of an enum's variants.
fn variants<T: for<'de> Deserialize<'de>>() -> Vec<String> {
    let mut names: &'static [&'static str] = &[];
    T::deserialize(VariantNames(&mut names)).err().expect("only the names are wanted");
    assert!(!names.is_empty());
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn every_request_of_the_protocol_has_a_row_and_every_row_a_request() {
    let mut requests = variants::<RequestBody>();
    requests.retain(|name| name != "Object");
    requests.extend(variants::<ObjectRequest>());
    let requests: BTreeSet<String> = requests.into_iter().collect();
    assert_eq!(Table::read("request").names(), requests);
}
