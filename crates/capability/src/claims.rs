//! [`Claims`]: the content of a capability, and its form in CBOR.

use coset::cbor::value::{Integer, Value};
use coset::cwt::{ClaimsSet, ClaimsSetBuilder, Timestamp};
use coset::iana::CwtClaimName;
use coset::{CborSerializable, CoseSign1, RegisteredLabelWithPrivate, iana};
use identity::KeyHash;
use uuid::Uuid;
use wire::limits::MAX_GRANTS;
use wire::{Verbs, Within};

/// Maximum number of third parties in a capability.
const MEMORY_MAX: usize = 16;

/// Labels of the private claims (RFC 8392, section 9.1: below -65536).
const TENANT: i64 = -70_001;
const USER: i64 = -70_002;
const REVISION: i64 = -70_003;
const GRANTS: i64 = -70_004;
const QOS_CLASS: i64 = -70_005;
const MEMORY: i64 = -70_006;

/// Label of the key's name in the confirmation claim (RFC 8747, section 3.1).
const CONFIRMATION_KEY_ID: i64 = 3;

/// The verbs that the holder may apply to some objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimedGrant {
    /// Number of the pool; `None` for all pools of the tenant.
    pub pool: Option<u32>,
    /// The part of the pool; `None` for the whole pool.
    pub within: Option<Within>,
    /// The verbs.
    pub verbs: Verbs,
}

/// The content of a capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// The node that accepts the capability.
    pub node: Uuid,
    /// Name of the holder, `TENANT/USER`, for people.
    pub name: String,
    /// Number of the holder's tenant.
    pub tenant: u32,
    /// Number of the holder.
    pub user: u32,
    /// Number of changes of the holder's rights. The osd refuses a capability from before the last
    /// change.
    pub revision: u64,
    /// The key that the holder must prove.
    pub key: KeyHash,
    /// Time of issue, in seconds since 1970.
    pub issued: u64,
    /// Time from which the capability is invalid, in seconds since 1970.
    pub expires: u64,
    /// Random number that names the capability in the audit log.
    pub id: [u8; 16],
    /// What the holder may do.
    pub grants: Vec<ClaimedGrant>,
    /// Class of service of the holder's requests; 0 is the default class.
    pub qos_class: u32,
    /// Fabric addresses of the third parties whose memory the holder may name in requests.
    pub memory: Vec<Vec<u8>>,
}

impl Claims {
    /// Returns the claims of a capability, without verifying that a node has signed it. `None` for bytes
    /// that are no capability.
    #[must_use]
    pub fn unverified(capability: &[u8]) -> Option<Claims> {
        Claims::decode(CoseSign1::from_slice(capability).ok()?.payload.as_deref()?)
    }

    /// Encodes the claims as a CWT claims set.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        let confirmation =
            Value::Map(vec![(CONFIRMATION_KEY_ID.into(), Value::Bytes(self.key.as_bytes().to_vec()))]);
        let set = ClaimsSetBuilder::new()
            .subject(self.name.clone())
            .audience(self.node.to_string())
            .expiration_time(Timestamp::WholeSeconds(self.expires.try_into().ok()?))
            .issued_at(Timestamp::WholeSeconds(self.issued.try_into().ok()?))
            .cwt_id(self.id.to_vec())
            .claim(CwtClaimName::Cnf, confirmation)
            .private_claim(TENANT, self.tenant.into())
            .private_claim(USER, self.user.into())
            .private_claim(REVISION, self.revision.into())
            .private_claim(GRANTS, Value::Array(self.grants.iter().map(encode_grant).collect()))
            .private_claim(QOS_CLASS, self.qos_class.into())
            .private_claim(MEMORY, Value::Array(self.memory.iter().cloned().map(Value::Bytes).collect()))
            .build();
        set.to_vec().ok()
    }

    /// Decodes bytes from [`Claims::encode`]; `None` for other bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Claims> {
        let set = ClaimsSet::from_slice(bytes).ok()?;
        let private = |label: i64| {
            let named = |name: &coset::cwt::ClaimName| *name == RegisteredLabelWithPrivate::PrivateUse(label);
            set.rest.iter().find(|(name, _)| named(name)).map(|(_, value)| value)
        };
        let confirmation = RegisteredLabelWithPrivate::Assigned(iana::CwtClaimName::Cnf);
        let confirmation = set.rest.iter().find(|(name, _)| *name == confirmation)?.1.as_map()?;
        let [(label, key)] = confirmation.as_slice() else { return None };
        let key: [u8; 32] = key.as_bytes()?.as_slice().try_into().ok()?;
        (*label == Value::from(CONFIRMATION_KEY_ID)).then_some(())?;
        let grants = private(GRANTS)?.as_array()?;
        let memory = private(MEMORY)?.as_array()?;
        (grants.len() <= MAX_GRANTS && memory.len() <= MEMORY_MAX).then_some(())?;
        let claims = Claims {
            node: set.audience.as_deref()?.parse().ok()?,
            name: set.subject.clone()?,
            tenant: number(private(TENANT)?)?.try_into().ok()?,
            user: number(private(USER)?)?.try_into().ok()?,
            revision: number(private(REVISION)?)?,
            key: KeyHash::from(key),
            issued: seconds(set.issued_at.as_ref()?)?,
            expires: seconds(set.expiration_time.as_ref()?)?,
            id: set.cwt_id.as_deref()?.try_into().ok()?,
            grants: grants.iter().map(decode_grant).collect::<Option<_>>()?,
            qos_class: number(private(QOS_CLASS)?)?.try_into().ok()?,
            memory: memory.iter().map(|address| address.as_bytes().cloned()).collect::<Option<_>>()?,
        };
        // A claim that this version does not know may restrict the rights, and each content has only
        // one valid form.
        (claims.encode()? == bytes).then_some(claims)
    }
}

fn number(value: &Value) -> Option<u64> {
    value.as_integer().and_then(|number: Integer| number.try_into().ok())
}

fn seconds(timestamp: &Timestamp) -> Option<u64> {
    match timestamp {
        Timestamp::WholeSeconds(seconds) => (*seconds).try_into().ok(),
        Timestamp::FractionalSeconds(_) => None,
    }
}

fn encode_grant(grant: &ClaimedGrant) -> Value {
    let text = |text: fn(&Within) -> &String| {
        grant.within.as_ref().map_or(Value::Null, |within| Value::Text(text(within).clone()))
    };
    Value::Array(vec![
        grant.pool.map_or(Value::Null, Value::from),
        text(|within| &within.namespace),
        text(|within| &within.prefix),
        u8::from(grant.verbs).into(),
    ])
}

fn decode_grant(value: &Value) -> Option<ClaimedGrant> {
    let [pool, namespace, prefix, verbs] = value.as_array()?.as_slice() else { return None };
    let pool = if pool.is_null() { None } else { Some(number(pool)?.try_into().ok()?) };
    let within = match (namespace.as_text(), prefix.as_text()) {
        (Some(namespace), Some(prefix)) => {
            Some(Within { namespace: namespace.to_owned(), prefix: prefix.to_owned() })
        }
        _ => (namespace.is_null() && prefix.is_null()).then_some(None)?,
    };
    let verbs = u8::try_from(number(verbs)?).ok()?.try_into().ok()?;
    Some(ClaimedGrant { pool, within, verbs })
}
