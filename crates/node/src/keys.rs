//! The list of what can be configured, as [`Config`] declares it.

use std::sync::LazyLock;

use confique::Config as _;
use confique::meta::{FieldKind, LeafKind, Meta};
use toml::Value;

use super::config::Config;

/// A key of the configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Key {
    /// Section of the file, empty for the top.
    pub section: &'static str,
    /// Name within the section.
    pub name: &'static str,
    /// What it means: unit, range, consequence; by line, each with a space before it.
    pub about: &'static [&'static str],
    default: Value,
    env: Option<&'static str>,
}

/// All keys, in the order of the file.
pub fn keys() -> &'static [Key] {
    static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| of_section("", &Config::META));
    &KEYS
}

fn of_section(section: &'static str, meta: &'static Meta) -> Vec<Key> {
    let mut found = Vec::new();
    for field in meta.fields {
        match field.kind {
            FieldKind::Nested { meta } => found.extend(of_section(field.name, meta)),
            FieldKind::Leaf { env, kind: LeafKind::Required { default: Some(default) } } => found.push(Key {
                section,
                name: field.name,
                about: field.doc,
                default: Value::try_from(default).expect("defaults are TOML"),
                env,
            }),
            FieldKind::Leaf { .. } => unreachable!("every key has a default"),
        }
    }
    found
}

impl Key {
    /// `section.name`, or `name` at the top.
    pub fn path(&self) -> String {
        if self.section.is_empty() { self.name.to_owned() } else { format!("{}.{}", self.section, self.name) }
    }

    /// The environment variable that overrides the file: by the path, unless the declaration names another one.
    pub fn env(&self) -> String {
        let by_path = || format!("OUTBOARD_{}", self.path().replace('.', "_").to_uppercase());
        self.env.map_or_else(by_path, str::to_owned)
    }

    /// What it means, in one line.
    pub fn text(&self) -> String {
        self.about.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
    }

    /// Its default.
    pub fn default_value(&self) -> &Value {
        &self.default
    }

    /// A value as text (from the environment) of the kind that the key has.
    pub fn parse(&self, text: &str) -> Value {
        match self.default {
            Value::Array(_) => Value::Array(text.split(':').map(|t| Value::String(t.to_owned())).collect()),
            Value::Integer(_) => text.parse().map_or_else(|_| Value::String(text.to_owned()), Value::Integer),
            _ => Value::String(text.to_owned()),
        }
    }
}
