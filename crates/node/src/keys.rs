//! The list of configuration keys, as [`Config`] declares them.

use std::sync::LazyLock;

use confique::Config as _;
use confique::meta::{FieldKind, LeafKind, Meta};
use toml::Value;

use super::config::Config;

/// A key of the configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Key {
    /// Section of the file; empty for keys outside of all sections.
    pub section: &'static str,
    /// Name within the section.
    pub name: &'static str,
    /// Lines of the key's description: meaning, unit and range. Each line starts with a space.
    pub about: &'static [&'static str],
    default: Value,
    env: Option<&'static str>,
}

/// Returns all keys, in the order of the generated configuration file.
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
                default: Value::try_from(default).expect("every default has a TOML form"),
                env,
            }),
            FieldKind::Leaf { .. } => unreachable!("every key has a default"),
        }
    }
    found
}

/// Returns the name of the environment variable that derives from the path of a key.
pub fn env_of_path(path: &str) -> String {
    format!("OUTBOARD_{}", path.replace('.', "_").to_uppercase())
}

impl Key {
    /// Returns `section.name`, or `name` for a key outside of all sections.
    pub fn path(&self) -> String {
        if self.section.is_empty() { self.name.to_owned() } else { format!("{}.{}", self.section, self.name) }
    }

    /// Returns the name of the environment variable that overrides the key's value in the file. The
    /// name derives from the key's path unless the key's declaration names another variable.
    pub fn env(&self) -> String {
        self.env.map_or_else(|| env_of_path(&self.path()), str::to_owned)
    }

    /// Returns the description as one line.
    pub fn text(&self) -> String {
        self.about.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
    }

    /// Returns the default value.
    pub fn default_value(&self) -> &Value {
        &self.default
    }

    /// Converts the text of the key's environment variable to the type of the key's value.
    pub fn parse(&self, text: &str) -> Value {
        match self.default {
            Value::Array(_) => Value::Array(text.split(':').map(|t| Value::String(t.to_owned())).collect()),
            Value::Integer(_) => text.parse().map_or_else(|_| Value::String(text.to_owned()), Value::Integer),
            Value::Boolean(_) => text.parse().map_or_else(|_| Value::String(text.to_owned()), Value::Boolean),
            _ => Value::String(text.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(variable: &str, value: &str) -> Config {
        let env = |name: &str| (name == variable).then(|| value.to_owned());
        let path = std::path::Path::new("config.toml");
        crate::config_file::of_text("", path, env).unwrap_or_else(|e| panic!("{variable}={value}: {e}"))
    }

    #[test]
    fn the_environment_accepts_the_default_of_every_key() {
        for key in keys() {
            match &key.default {
                Value::Array(_) => {}
                Value::String(text) => drop(load(&key.env(), text)),
                other => drop(load(&key.env(), &other.to_string())),
            }
        }
        assert!(!load("OUTBOARD_CODING_COUNT_STORE", "false").coding.count_store);
    }
}
