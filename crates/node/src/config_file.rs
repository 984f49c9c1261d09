//! The configuration file of a node: reads, generates and changes it.
//!
//! Values come from flags, the environment, the file or the defaults, in this order of precedence.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use confique::Layer;
use toml::{Table, Value};

use super::config::Config;
use super::keys::{Key, env_of_path, keys};

/// Name of the file within a node's directory.
pub const FILE: &str = "outboard.toml";

/// Reason why a configuration is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}; check the path and its permissions", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The file is not valid TOML.
    #[error("{} is not valid TOML: {reason}; correct it", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The position and the error.
        reason: String,
    },
    /// The file has an unknown key.
    #[error("{}: unknown key `{key}`; {hint}", path.display())]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// The key, with its section.
        key: String,
        /// The key that the user may have meant, or all known keys.
        hint: String,
    },
    /// The environment sets a key of an earlier version.
    #[error("environment: unknown variable `{variable}`; {hint}")]
    ReplacedVariable {
        /// The environment variable.
        variable: String,
        /// The key that replaces the variable's key.
        hint: String,
    },
    /// A value has the wrong type or is out of range.
    #[error("{origin}: {reason}; `docs/configuration.md` and the generated file list the valid values")]
    Invalid {
        /// File and environment variables that the values came from.
        origin: String,
        /// The key of the value, and the error.
        reason: String,
    },
}

/// Reads `file` and overrides its values by the environment variables that `env` returns. Without a
/// file, the defaults apply.
///
/// # Errors
/// If the file is unreadable, is not valid TOML or has an unknown key, if the environment sets a key
/// of an earlier version, or if a value is invalid.
pub fn load(file: Option<&Path>, env: impl Fn(&str) -> Option<String>) -> Result<Config, ConfigError> {
    let Some(path) = file else { return over(Table::new(), "configuration", env) };
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
    of_text(&text, path, env)
}

/// Parses the text of a file at `path`, which need not exist yet, and overrides its values by the
/// environment variables that `env` returns.
///
/// # Errors
/// The same errors as [`load`].
pub fn of_text(text: &str, path: &Path, env: impl Fn(&str) -> Option<String>) -> Result<Config, ConfigError> {
    let mut table = Table::new();
    overlay(&mut table, parse(text, path)?, path)?;
    over(table, &path.display().to_string(), env)
}

fn over(file: Table, origin: &str, env: impl Fn(&str) -> Option<String>) -> Result<Config, ConfigError> {
    let mut table = file;
    let mut origin = origin.to_owned();
    for replaced in &REPLACED {
        let variable = env_of_path(replaced.old);
        if env(&variable).is_some() {
            return Err(ConfigError::ReplacedVariable { variable, hint: replaced.hint() });
        }
    }
    for key in keys() {
        if let Some(text) = env(&key.env()) {
            set(&mut table, key, key.parse(&text));
            let _ = write!(origin, ", {}", key.env());
        }
    }
    let invalid = |reason: String| ConfigError::Invalid { origin: origin.clone(), reason };
    let layer: <Config as confique::Config>::Layer =
        table.try_into().map_err(|e: toml::de::Error| invalid(key_first(&e.to_string())))?;
    let config = <Config as confique::Config>::from_layer(layer.with_fallback(Layer::default_values()))
        .map_err(|e| invalid(e.to_string()))?;
    config.check().map_err(|e| invalid(e.to_string()))?;
    Ok(config)
}

/// Sets `key` to `value`.
fn set(table: &mut Table, key: &Key, value: Value) {
    if key.section.is_empty() {
        table.insert(key.name.to_owned(), value);
    } else if let Value::Table(section) =
        table.entry(key.section).or_insert_with(|| Value::Table(Table::new()))
    {
        section.insert(key.name.to_owned(), value);
    }
}

/// Rewrites an error message about a value so that it starts with the key.
fn key_first(message: &str) -> String {
    let message = message.trim();
    match message.rsplit_once("\nin `") {
        Some((what, key)) => {
            format!("{}: {}", key.trim_end_matches('`'), what.trim_start_matches("validation failed: "))
        }
        None => message.to_owned(),
    }
}

fn parse(text: &str, path: &Path) -> Result<Table, ConfigError> {
    text.parse().map_err(|e: toml::de::Error| ConfigError::Syntax {
        path: path.to_owned(),
        reason: e.to_string().trim().to_owned(),
    })
}

fn overlay(table: &mut Table, file: Table, path: &Path) -> Result<(), ConfigError> {
    for (name, value) in file {
        match value {
            Value::Table(section) if keys().iter().any(|k| k.section == name) => {
                for (inner, value) in section {
                    set(table, find(&name, &inner, path)?, value);
                }
            }
            value => set(table, find("", &name, path)?, value),
        }
    }
    Ok(())
}

/// A key of earlier versions.
struct ReplacedKey {
    old: &'static str,
    /// The key that replaces it.
    new: &'static str,
    /// How the values of the two keys differ.
    difference: &'static str,
}

const REPLACED: [ReplacedKey; 2] =
    [replaced_by_cache("store.index_cache"), replaced_by_cache("store.metadata_cache")];

const fn replaced_by_cache(old: &'static str) -> ReplacedKey {
    let difference = "the old value applied to each target, the new value applies to all targets together";
    ReplacedKey { old, new: "store.cache", difference }
}

impl ReplacedKey {
    fn hint(&self) -> String {
        format!("it was replaced by `{}`: {}", self.new, self.difference)
    }
}

fn find(section: &str, name: &str, path: &Path) -> Result<&'static Key, ConfigError> {
    if let Some(key) = keys().iter().find(|k| k.section == section && k.name == name) {
        return Ok(key);
    }
    let elsewhere = keys().iter().find(|k| k.name == name).map(Key::path);
    let all = || keys().iter().map(Key::path).collect::<Vec<_>>().join(", ");
    let key = if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") };
    let hint = match (REPLACED.iter().find(|replaced| replaced.old == key), elsewhere) {
        (Some(replaced), _) => replaced.hint(),
        (None, Some(path)) => format!("did you mean `{path}`?"),
        (None, None) => format!("the known keys are {}", all()),
    };
    Err(ConfigError::UnknownKey { path: path.to_owned(), key, hint })
}

/// Returns whether a key outside of all sections is set, by the environment or by the text of a
/// file.
pub fn is_set(name: &str, text: &str, env: impl Fn(&str) -> Option<String>) -> bool {
    let in_file = text.parse::<Table>().is_ok_and(|table| table.contains_key(name));
    in_file || env_of(name).is_some_and(|variable| env(&variable).is_some())
}

/// Returns the environment variable of the key with this path.
pub fn env_of(path: &str) -> Option<String> {
    keys().iter().find(|key| key.path() == path).map(Key::env)
}

/// Adds the setting `name = value` to the text of a configuration file that does not set this key
/// yet. The key must be outside of all sections. Returns the new text.
pub fn remember(text: &str, name: &str, value: &Value) -> String {
    let (line, default) = (format!("{name} = {value}\n"), format!("# {name} = "));
    // A generated file contains the key and its default as a comment. Replace this line.
    match text.split_inclusive('\n').position(|l| l.starts_with(&default)) {
        Some(at) => text
            .split_inclusive('\n')
            .enumerate()
            .map(|(n, old)| if n == at { line.as_str() } else { old })
            .collect(),
        None => line + text,
    }
}

/// First line of each generated configuration file.
const FIRST_LINE: &str =
    "# Configuration of this Outboard node. Keys that are commented out show their default.";

/// Returns whether [`generate`] wrote the text of a configuration file, so that a first `up` created
/// the node. The operator may have changed the text later.
pub fn is_generated(text: &str) -> bool {
    text.starts_with(FIRST_LINE)
}

/// Generates the text of a configuration file: every key with its description. The keys in `chosen`
/// are set; the other keys show their defaults and are commented out.
pub fn generate(chosen: &[(&str, Value)]) -> String {
    let mut text =
        format!("{FIRST_LINE}\n# Order of precedence: flags, environment variables, this file, defaults.\n");
    let mut section = "";
    for key in keys() {
        if key.section != section {
            section = key.section;
            let _ = write!(text, "\n[{section}]\n");
        }
        text.push('\n');
        for line in key.about {
            let _ = writeln!(text, "#{line}");
        }
        let _ = writeln!(text, "# Environment: {}", key.env());
        match chosen.iter().find(|(path, _)| *path == key.path()) {
            Some((_, value)) => {
                let _ = writeln!(text, "{} = {value}", key.name);
            }
            None => {
                let _ = writeln!(text, "# {} = {}", key.name, key.default_value());
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use wire::Placement;

    use super::*;
    use crate::units::ByteSize;

    fn load(text: &str, env: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        super::load(Some(file.path()), |name| {
            env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
        })
    }

    #[test]
    fn the_error_for_a_key_of_an_earlier_version_names_the_key_that_replaces_it() {
        let error = load("[store]\nindex_cache = \"32MiB\"\n", &[]).unwrap_err().to_string();
        assert!(error.contains("`store.index_cache`; it was replaced by `store.cache`"), "{error}");
        let error = load("", &[("OUTBOARD_STORE_METADATA_CACHE", "1")]).unwrap_err().to_string();
        let expected = "`OUTBOARD_STORE_METADATA_CACHE`; it was replaced by `store.cache`";
        assert!(error.contains(expected), "{error}");
        for replaced in REPLACED {
            assert!(keys().iter().any(|key| key.path() == replaced.new), "{}", replaced.new);
        }
    }

    #[test]
    fn the_environment_overrides_the_file_and_the_file_overrides_the_defaults() {
        let text = "placement = \"host\"\nlisten = \"127.0.0.1:7\"\n[supervise]\nbackoff_max = \"9s\"\n";
        let env = [
            ("OUTBOARD_LISTEN", "127.0.0.1:8"),
            ("OUTBOARD_LOG", "debug"),
            ("OUTBOARD_TARGETS", "a:b"),
            ("OUTBOARD_OSD_SESSIONS", "7"),
        ];
        let config = load(text, &env).unwrap();
        assert_eq!(config.placement, Placement::Host);
        assert_eq!(config.listen, "127.0.0.1:8");
        assert_eq!((config.log.level.as_str(), config.osd.sessions), ("debug", 7));
        assert_eq!(config.targets, [PathBuf::from("a"), PathBuf::from("b")]);
        assert_eq!(config.supervise.backoff_max.to_string(), "9s");
        assert_eq!(config.target_size, ByteSize(8 << 30));
    }

    #[test]
    fn the_error_about_an_unknown_key_names_the_key() {
        for (text, named) in [
            ("placment = \"host\"", "`placment`"),
            ("[supervise]\nbackof = \"1s\"", "`supervise.backof`"),
            ("level = \"info\"", "`log.level`"),
            ("[nosuch]\nx = 1", "`nosuch`"),
        ] {
            let error = load(text, &[]).unwrap_err();
            assert!(matches!(error, ConfigError::UnknownKey { .. }), "{error}");
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn invalid_values_are_refused_with_the_name_of_the_key() {
        for text in [
            "placement = \"moon\"",
            "target_size = \"eight\"",
            "log = 3",
            "[supervise]\nbackoff_min = \"10s\"",
            "[supervise]\nbackoff_min = \"0ms\"",
            "[supervise]\nhung_after = \"1ms\"",
            "[log]\nlevel = \"=,=\"",
            "[osd]\nsessions = 0",
            "[osd]\nstaging = \"9MiB\"",
            "[osd]\ncpus = \"most\"",
            "[channel]\nwindow = \"3MiB\"",
            "[channel]\nqueues = 65",
            "[channel]\npoll_us = 10001",
            "[channel]\nmax_transfer = \"4MiB\"",
            "[channel]\nprofile = \"fast\"",
            "[channel]\nengine = \"ofi\"",
            "[coding]\nmode = \"hybrid:0:0\"",
            "[coding]\noffload = \"gpu\"",
            "[coding]\ndpu_threads = 0",
            "[coding]\nbusy_utilization = 0",
            "[coding]\nbusy_utilization = 70",
            "[coding]\ncalm_pressure = 50",
            "[debug]\nfaults = [\"everything=breaks\"]",
        ] {
            let error = load(text, &[]).unwrap_err().to_string();
            // The error contains the name of the key.
            let key = text.lines().last().unwrap().split(' ').next().unwrap();
            assert!(error.contains(key), "{text}: {error}");
        }
        assert!(matches!(load("a = ", &[]), Err(ConfigError::Syntax { .. })));
        assert!(matches!(load("", &[("OUTBOARD_TARGET_SIZE", "x")]), Err(ConfigError::Invalid { .. })));
        assert!(matches!(load("", &[("OUTBOARD_OSD_SESSIONS", "x")]), Err(ConfigError::Invalid { .. })));
    }

    #[test]
    fn the_generated_file_contains_every_key_with_its_default() {
        let targets = Value::Array(vec![Value::String("targets/0.img".into())]);
        let text = generate(&[("targets", targets)]);
        let config = load(&text, &[]).unwrap();
        assert_eq!(config.targets, [PathBuf::from("targets/0.img")]);
        let defaults = load("", &[]).unwrap();
        assert_eq!(Config { targets: vec![], ..config }, defaults);
        for key in keys() {
            let line = format!("{} = ", key.name);
            assert!(text.lines().any(|l| l.trim_start_matches("# ").starts_with(&line)), "{}", key.path());
        }
    }

    #[test]
    fn remembering_a_key_sets_this_key_and_changes_nothing_else() {
        let listen = Value::String("127.0.0.1:7401".to_owned());
        for text in [generate(&[]), "targets = [\"a\"]\n[log]\nlevel = \"debug\"\n".to_owned(), String::new()]
        {
            assert!(!is_set("listen", &text, |_| None));
            let remembered = remember(&text, "listen", &listen);
            assert!(is_set("listen", &remembered, |_| None), "{remembered}");
            let before = load(&text, &[]).unwrap();
            assert_eq!(load(&remembered, &[]).unwrap(), Config { listen: "127.0.0.1:7401".into(), ..before });
        }
        assert!(is_set("listen", "", |name| (name == "OUTBOARD_LISTEN").then(String::new)));
    }

    /// `docs/configuration.md` has a row `| key | environment | default | meaning |` for each key,
    /// and no other rows. With `UPDATE_DOCS=1`, the test writes the rows.
    #[test]
    fn the_documentation_lists_every_key_as_declared() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
        let mut text = std::fs::read_to_string(&path).unwrap();
        let expected: Vec<String> = keys()
            .iter()
            .map(|k| format!("| `{}` | `{}` | `{}` | {} |", k.path(), k.env(), k.default_value(), k.text()))
            .collect();
        let is_row = |line: &&str| line.starts_with("| `");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            let (head, tail) = text.split_at(text.find("| `").unwrap());
            let tail: Vec<&str> = tail.lines().skip_while(is_row).collect();
            text = format!("{head}{}\n{}\n", expected.join("\n"), tail.join("\n"));
            std::fs::write(&path, &text).unwrap();
        }
        let documented: Vec<&str> = text.lines().filter(is_row).collect();
        assert_eq!(
            documented, expected,
            "the table is outdated; run this test with UPDATE_DOCS=1 to write it"
        );
    }
}
