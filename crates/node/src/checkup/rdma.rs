//! The checks of RDMA: libfabric, devices, their ports, addresses and packet sizes.

use std::fs;
use std::path::{Path, PathBuf};

use fabric::{FabricError, Library, ProviderQuery};

use super::{Finding, Grade};

/// Directory in which the kernel lists RDMA devices.
const DEVICES: &str = "/sys/class/infiniband";
/// Directory in which the kernel lists network interfaces.
const INTERFACES: &str = "/sys/class/net";
/// Directory of the character devices that programs open to use RDMA.
const CHARACTER_DEVICES: &str = "/dev/infiniband";

/// Minimum Ethernet MTU, in bytes, with which RoCE sends packets of 4096 bytes.
const MTU_WANTED: u32 = 4200;

/// Runs all RDMA checks.
pub(super) fn all() -> Vec<Finding> {
    let devices = devices(Path::new(DEVICES));
    let mut findings = vec![library(!devices.is_empty())];
    if devices.is_empty() {
        findings.push(Finding {
            what: "RDMA device",
            grade: Grade::Good,
            found: "none; clients connect over TCP".to_owned(),
            why: "with RDMA, data moves between client and osd without using their CPUs",
            remedy: None,
        });
        return findings;
    }
    findings.push(access(Path::new(CHARACTER_DEVICES)));
    findings.push(provider());
    for device in &devices {
        findings.extend(ports(device, Path::new(INTERFACES)));
    }
    findings
}

fn read(path: PathBuf) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn entries(path: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(path).map_or_else(|_| Vec::new(), |dir| dir.flatten().map(|e| e.path()).collect());
    entries.sort();
    entries
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn devices(root: &Path) -> Vec<PathBuf> {
    entries(root)
}

/// Checks that libfabric can be loaded, and lists its providers.
fn library(has_devices: bool) -> Finding {
    let found = Library::load().map(|library| {
        let mut providers: Vec<String> = library
            .query(&ProviderQuery::default())
            .map_or_else(|_| Vec::new(), |infos| infos.iter().map(fabric::Info::provider).collect());
        providers.sort();
        providers.dedup();
        let (major, minor) = library.version();
        format!("{major}.{minor}; providers with connected endpoints: {}", providers.join(", "))
    });
    let missing = matches!(found, Err(FabricError::NotLoaded(_)));
    Finding {
        what: "libfabric",
        grade: if found.is_ok() || !has_devices { Grade::Good } else { Grade::Costs },
        found: found.as_ref().map_or_else(|e| format!("not used: {e}"), Clone::clone),
        why: "Outboard uses RDMA through libfabric; without libfabric, everything works over TCP",
        remedy: (found.is_err() && has_devices).then(|| match missing {
            true => "install libfabric (Debian: apt install libfabric1)".to_owned(),
            false => "start the program with FI_MR_CACHE_MAX_COUNT=0 in its environment".to_owned(),
        }),
    }
}

/// Checks whether this user may open the RDMA devices and the connection manager.
fn access(root: &Path) -> Finding {
    let may_open = |path: &Path| fs::OpenOptions::new().read(true).write(true).open(path).is_ok();
    let verbs = entries(root).iter().any(|path| name(path).starts_with("uverbs") && may_open(path));
    let connections = may_open(&root.join("rdma_cm"));
    let found = match (verbs, connections) {
        (true, true) => "devices and the connection manager can be used",
        (true, false) => "the connection manager (rdma_cm) cannot be opened",
        (false, _) => "no device can be opened",
    };
    let good = verbs && connections;
    Finding {
        what: "RDMA access",
        grade: if good { Grade::Good } else { Grade::Costs },
        found: found.to_owned(),
        why: "programs open /dev/infiniband/uverbs* and /dev/infiniband/rdma_cm",
        remedy: (!good).then(|| {
            "load the modules (modprobe ib_uverbs rdma_ucm), and allow this user (group, udev rule or container device)"
                .to_owned()
        }),
    }
}

/// Checks whether libfabric finds the devices.
fn provider() -> Finding {
    let query = ProviderQuery { provider: Some("verbs".to_owned()), ..ProviderQuery::default() };
    let found = Library::load().and_then(|library| library.query(&query));
    let described = found.as_ref().map(|infos| {
        let mut devices: Vec<String> = infos.iter().map(fabric::Info::domain_name).collect();
        devices.sort();
        devices.dedup();
        format!("libfabric finds {}", devices.join(", "))
    });
    Finding {
        what: "verbs provider",
        grade: if found.is_ok() { Grade::Good } else { Grade::Costs },
        found: described.unwrap_or_else(|e| format!("libfabric finds no device: {e}")),
        why: "libfabric uses this provider for RoCE, InfiniBand and iWARP; the device's interface needs an IP address",
        remedy: found.is_err().then(|| {
            "install the user-space drivers of the devices (Debian: apt install ibverbs-providers), and assign IP addresses to their interfaces"
                .to_owned()
        }),
    }
}

/// Checks the ports of a device.
fn ports(device: &Path, interfaces: &Path) -> Vec<Finding> {
    let is_iwarp = read(device.join("node_type")).is_some_and(|kind| kind.starts_with('4'));
    let mut findings = Vec::new();
    for port in entries(&device.join("ports")) {
        let label = format!("{} port {}", name(device), name(&port));
        let layer = read(port.join("link_layer")).unwrap_or_else(|| "unknown".to_owned());
        let kind = match (is_iwarp, layer.as_str()) {
            (true, _) => "iWARP",
            (false, "Ethernet") => "RoCE",
            (false, other) => other,
        };
        let interface = read(port.join("gid_attrs/ndevs/0"));
        findings.push(state(&port, &label, kind, interface.as_deref()));
        findings.push(addresses(&port, &label, kind, interface.as_deref()));
        findings.extend(mtu(&label, kind, interface.as_deref(), interfaces));
    }
    findings
}

fn state(port: &Path, label: &str, kind: &str, interface: Option<&str>) -> Finding {
    let state = read(port.join("state")).unwrap_or_else(|| "unknown".to_owned());
    let rate = read(port.join("rate")).map_or_else(String::new, |rate| format!(", {rate}"));
    let is_up = state.ends_with("ACTIVE");
    let interface = interface.unwrap_or("no interface");
    Finding {
        what: "RDMA port",
        grade: if is_up { Grade::Good } else { Grade::Costs },
        found: format!("{label}: {kind}, {state}{rate}, {interface}"),
        why: "a port that is not active transfers no data",
        remedy: (!is_up).then(|| format!("check the cable and the switch; `ip link set {interface} up`")),
    }
}

fn addresses(port: &Path, label: &str, kind: &str, interface: Option<&str>) -> Finding {
    let is_set = |gid: &str| gid.chars().any(|c| c.is_ascii_hexdigit() && c != '0');
    let gids: Vec<(String, String)> = entries(&port.join("gids"))
        .iter()
        .filter_map(|gid| {
            let value = read(gid.clone()).filter(|value| is_set(value))?;
            let kind = read(port.join("gid_attrs/types").join(gid.file_name()?)).unwrap_or_default();
            Some((value, kind))
        })
        .collect();
    // Only RoCE version 2 works across routers, and rdma_cm uses this version for IP addresses.
    let good = match kind {
        "RoCE" => gids.iter().any(|(_, kind)| kind == "RoCE v2"),
        _ => !gids.is_empty(),
    };
    let listed: Vec<String> = gids.iter().take(4).map(|(gid, kind)| format!("{gid} ({kind})")).collect();
    let interface = interface.unwrap_or("its interface");
    Finding {
        what: "RDMA addresses",
        grade: if good { Grade::Good } else { Grade::Costs },
        found: match gids.len() {
            0 => format!("{label}: none"),
            count => format!("{label}: {count} GIDs: {}", listed.join(", ")),
        },
        why: "programs address peers by IP address, and the device translates the address to a GID",
        remedy: (!good)
            .then(|| format!("give {interface} an IP address: `ip addr add ADDRESS/BITS dev {interface}`")),
    }
}

fn mtu(label: &str, kind: &str, interface: Option<&str>, interfaces: &Path) -> Option<Finding> {
    let interface = interface?;
    let mtu: u32 = read(interfaces.join(interface).join("mtu"))?.parse().ok()?;
    let good = kind != "RoCE" || mtu >= MTU_WANTED;
    Some(Finding {
        what: "RDMA packet size",
        grade: if good { Grade::Good } else { Grade::Costs },
        found: format!("{label}: {interface} has an MTU of {mtu}"),
        why: "RoCE splits messages into packets; their size is the largest power of two that fits into the MTU, at most 4096 bytes",
        remedy: (!good).then(|| {
            format!(
                "set an MTU of at least {MTU_WANTED} on both ends and on all switches between them: `ip link set {interface} mtu {MTU_WANTED}`"
            )
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates the files by which sysfs describes a device.
    fn device(root: &Path, node_type: &str, state: &str, gid: &str, gid_type: &str, mtu: &str) -> PathBuf {
        let device = root.join("infiniband/dev0");
        let files = [
            ("infiniband/dev0/node_type", node_type),
            ("infiniband/dev0/ports/1/state", state),
            ("infiniband/dev0/ports/1/rate", "100 Gb/sec (4X EDR)"),
            ("infiniband/dev0/ports/1/link_layer", "Ethernet"),
            ("infiniband/dev0/ports/1/gids/0", gid),
            ("infiniband/dev0/ports/1/gid_attrs/types/0", gid_type),
            ("infiniband/dev0/ports/1/gid_attrs/ndevs/0", "eth9"),
            ("net/eth9/mtu", mtu),
        ];
        for (path, content) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{content}\n")).unwrap();
        }
        device
    }

    const GID: &str = "0000:0000:0000:0000:0000:ffff:c000:0201";
    const NO_GID: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

    #[test]
    fn a_healthy_rdma_port_gets_the_grade_good_and_each_fault_has_a_remedy() {
        let cases = [
            (("1: CA", "4: ACTIVE", GID, "RoCE v2", "4200"), [true, true, true]),
            (("1: CA", "1: DOWN", GID, "RoCE v2", "9000"), [false, true, true]),
            (("1: CA", "4: ACTIVE", NO_GID, "", "4200"), [true, false, true]),
            (("1: CA", "4: ACTIVE", GID, "IB/RoCE v1", "1500"), [true, false, false]),
            (("4: RNIC", "4: ACTIVE", GID, "IB/RoCE v1", "1500"), [true, true, true]),
        ];
        for ((node_type, state, gid, gid_type, mtu), good) in cases {
            let root = tempfile::tempdir().unwrap();
            let device = device(root.path(), node_type, state, gid, gid_type, mtu);
            let findings = ports(&device, &root.path().join("net"));
            let grades: Vec<bool> = findings.iter().map(|f| f.grade == Grade::Good).collect();
            assert_eq!(grades, good, "{findings:#?}");
            assert!(findings.iter().all(|f| (f.grade == Grade::Good) == f.remedy.is_none()));
        }
    }

    #[test]
    fn rdma_devices_that_cannot_be_opened_get_the_grade_costs() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(access(root.path()).grade, Grade::Costs);
        fs::write(root.path().join("uverbs0"), "").unwrap();
        assert!(access(root.path()).found.contains("rdma_cm"));
        fs::write(root.path().join("rdma_cm"), "").unwrap();
        assert_eq!(access(root.path()).grade, Grade::Good);
    }
}
