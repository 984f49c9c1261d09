//! The memory that this process may use: the machine's memory, or the limit of its control groups
//! (cgroups).

use std::path::{Component, Path};

/// Returns the memory that this process may use, in bytes: the machine's memory, or the smallest
/// limit of the process's cgroup and its parents.
#[must_use]
pub fn machine_memory() -> u64 {
    let info = rustix::system::sysinfo();
    let machine = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit));
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cgroup_limit(&cgroups, Path::new("/sys/fs/cgroup")).map_or(machine, |limit| machine.min(limit))
}

/// Returns the smallest memory limit of a process's cgroups and their parents, in bytes. `cgroups` is
/// the process's file `/proc/PID/cgroup`, and `mount` is the directory of all cgroups.
///
/// The path of a cgroup need not exist below `mount`: a container may see its own cgroup there as the
/// root. The limit of the root then applies.
fn cgroup_limit(cgroups: &str, mount: &Path) -> Option<u64> {
    // Each line is ID:CONTROLLERS:PATH. The line of version 2 has no controllers.
    let limits = cgroups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        match controllers {
            "" => smallest_limit(mount, path, "memory.max"),
            _ if controllers.split(',').any(|controller| controller == "memory") => {
                smallest_limit(&mount.join("memory"), path, "memory.limit_in_bytes")
            }
            _ => None,
        }
    });
    limits.min()
}

/// Returns the smallest number in the files called `file` of the cgroup with this path and of its
/// parents, up to `root`.
fn smallest_limit(root: &Path, path: &str, file: &str) -> Option<u64> {
    let path = Path::new(path.trim_start_matches('/'));
    let is_below_root = path.components().all(|part| matches!(part, Component::Normal(_)));
    let path = if is_below_root { path } else { Path::new("") };
    let limits = path.ancestors().filter_map(|group| {
        let text = std::fs::read_to_string(root.join(group).join(file)).ok()?;
        // Without a limit, the file of version 2 contains "max".
        text.trim().parse::<u64>().ok()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(files: &[(&str, &str)]) -> tempfile::TempDir {
        let mount = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let file = mount.path().join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, format!("{text}\n")).unwrap();
        }
        mount
    }

    #[test]
    fn the_smallest_limit_of_a_cgroup_and_its_parents_applies() {
        let version_2 = mount(&[
            ("memory.max", "max"),
            ("system.slice/memory.max", "7000"),
            ("system.slice/node.service/memory.max", "9000"),
            ("system.slice/other.service/memory.max", "10"),
        ]);
        for (cgroups, limit) in [
            ("0::/system.slice/node.service\n", Some(7000)),
            ("0::/system.slice/other.service\n", Some(10)),
            ("0::/system.slice/node.service/absent\n", Some(7000)),
            ("0::/\n", None),
            ("0::/../system.slice\n", None),
            ("4:memory:/system.slice\n", None),
            ("", None),
        ] {
            assert_eq!(cgroup_limit(cgroups, version_2.path()), limit, "{cgroups}");
        }
    }

    #[test]
    fn limits_of_version_1_apply() {
        let unlimited = "9223372036854771712";
        let version_1 = mount(&[
            ("memory/memory.limit_in_bytes", unlimited),
            ("memory/a/memory.limit_in_bytes", "4096"),
            ("memory/a/b/memory.limit_in_bytes", unlimited),
            ("cpu/a/b/memory.limit_in_bytes", "1"),
        ]);
        let limit = |cgroups| cgroup_limit(cgroups, version_1.path());
        assert_eq!(limit("9:cpu:/a/b\n4:memory:/a/b\n0::/\n"), Some(4096));
        assert_eq!(limit("4:cpu,memory:/a\n"), Some(4096));
        assert_eq!(limit("4:cpu,memory:/\n"), unlimited.parse().ok());
        // A container sees its own cgroup as the root.
        let container = mount(&[("memory/memory.limit_in_bytes", "8192")]);
        assert_eq!(cgroup_limit("4:memory:/docker/1f\n0::/\n", container.path()), Some(8192));
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(machine_memory() > 64 << 20);
    }
}
