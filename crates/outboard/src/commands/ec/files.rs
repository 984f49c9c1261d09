//! Fragment files: their names and their creation.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::commands::cp::local::NewFile;
use node::failure::{Failure, Result};

/// Suffixes of the names of fragment files. Older versions wrote `.shard` files with the same
/// content.
const SUFFIXES: [&[u8]; 2] = [b".fragment", b".shard"];

/// Returns the path of fragment `index` of the file `prefix`, for example `PREFIX.007.fragment`.
pub fn fragment_path(prefix: &Path, index: usize) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(format!(".{index:03}.fragment"));
    name.into()
}

/// Returns the path of a fragment without `.NNN.fragment`; `None` if the file is not named like a
/// fragment.
pub fn prefix(fragment: &Path) -> Option<PathBuf> {
    let name = fragment.as_os_str().as_bytes();
    let rest = SUFFIXES.iter().find_map(|suffix| name.strip_suffix(*suffix))?;
    let (prefix, number) = rest.split_at_checked(rest.len().checked_sub(4)?)?;
    let numbered = number[0] == b'.' && number[1..].iter().all(u8::is_ascii_digit);
    let named =
        Path::new(std::ffi::OsStr::from_bytes(prefix)).file_name().is_some() && !prefix.ends_with(b"/");
    (numbered && named).then(|| OsString::from_vec(prefix.to_vec()).into())
}

/// Lists the existing fragments with the prefix `wanted`, sorted by name.
pub fn fragments_of(wanted: &Path) -> io::Result<Vec<PathBuf>> {
    let dir = parent(wanted);
    let mut found = vec![];
    for entry in fs::read_dir(dir)? {
        let name = PathBuf::from(entry?.file_name());
        if prefix(&name).is_some_and(|prefix| prefix.file_name() == wanted.file_name()) {
            found.push(wanted.with_file_name(name));
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the directory that contains `path`.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Fails if one of the files exists. With `force`, it never fails.
pub fn refuse_existing<'a>(
    doing: &str,
    paths: impl IntoIterator<Item = &'a Path>,
    force: bool,
) -> Result<()> {
    match paths.into_iter().find(|path| !force && path.symlink_metadata().is_ok()) {
        None => Ok(()),
        Some(path) => Err(Failure::new(doing, format!("{} exists; replace it with --force", path.display()))),
    }
}

/// Makes the contents of all files durable, gives the files their final names, and makes the names
/// in `dir` durable.
pub fn finish(files: Vec<NewFile>, dir: &Path) -> io::Result<()> {
    let mut files = files;
    files.iter_mut().try_for_each(|file| file.file().sync_all())?;
    files.into_iter().try_for_each(|file| file.finish(None))?;
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefix_of_a_fragment_is_parsed_from_its_file_name() {
        for (path, index, name) in [("a", 0, "a.000.fragment"), ("/x/b.tar", 254, "/x/b.tar.254.fragment")] {
            assert_eq!(fragment_path(Path::new(path), index), Path::new(name));
            assert_eq!(prefix(Path::new(name)), Some(path.into()));
        }
        assert_eq!(
            prefix(Path::new("/x/b.tar.254.shard")),
            Some("/x/b.tar".into()),
            "a name of an older version"
        );
        for other in [
            "a",
            "a.fragment",
            "a.00.fragment",
            "a.x00.fragment",
            ".000.fragment",
            "x/.000.fragment",
            ".fragment",
            "a-000.fragment",
        ] {
            assert_eq!(prefix(Path::new(other)), None, "{other}");
        }
    }
}
