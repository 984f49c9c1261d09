//! The operations that a gateway executes: each is one request to the control plane.

use wire::{AdminReply, AdminRequest, DiskCommand, DiskReply, DiskRequest};

use super::DisksCommand;
use super::names::{DiskOrSnapshot, DiskPath};
use super::shown::{self, ChangedDisk};
use crate::args::NodeArgs;
use crate::commands::session;
use crate::commands::tenant::unexpected;
use crate::output;
use node::failure::{Doing, Failure, Result};

/// A request about disks, and how its answer is printed.
#[derive(Debug)]
struct DiskOrder {
    request: DiskRequest,
    /// What the command does, for error messages.
    doing: String,
    shows: ShownAnswer,
    json: bool,
}

/// What a command prints.
#[derive(Debug)]
enum ShownAnswer {
    /// With `--json`, the change.
    Change(ChangedDisk),
    /// All disks of the reply.
    List,
    /// The only disk of the reply.
    Disk,
    Space(DiskPath),
    Attachment(DiskPath),
}

/// Runs a command that a gateway executes.
pub fn run(command: DisksCommand, node: &NodeArgs) -> Result<()> {
    let order = DiskOrder::new(command)?;
    session::administer(node, async move |client| {
        let DiskOrder { request, doing, shows, json } = order;
        let answer = client.administer(AdminRequest::Disk(request)).await.doing(&doing)?;
        let AdminReply::Disk(reply) = answer else { return Err(Failure::new(doing, unexpected())) };
        print(reply, shows, json).ok_or_else(|| Failure::new(doing, unexpected()))
    })
}

/// Prints a reply; `None` if it does not fit the request.
fn print(reply: DiskReply, shows: ShownAnswer, json: bool) -> Option<()> {
    match (shows, reply) {
        (ShownAnswer::Change(changed), DiskReply::Done) => output::json_if(json, &changed),
        (ShownAnswer::List, DiskReply::Disks(disks)) => shown::list(disks, json),
        (ShownAnswer::Disk, DiskReply::Disks(mut disks)) => shown::disk(disks.pop()?, json),
        (ShownAnswer::Space(disk), DiskReply::Usage(space)) => shown::space(&disk, space, json),
        (ShownAnswer::Attachment(disk), DiskReply::Attached(front_end)) => {
            shown::attachment(&disk, &front_end, json);
        }
        _ => return None,
    }
    Some(())
}

impl DiskOrder {
    /// Returns the request of a command.
    ///
    /// # Errors
    /// If the arguments contradict each other.
    fn new(command: DisksCommand) -> Result<DiskOrder> {
        let changes = |disk: &DiskPath, doing: String, command: DiskCommand, json: bool| DiskOrder {
            request: DiskRequest { pool: disk.pool.clone(), command },
            doing,
            shows: ShownAnswer::Change(ChangedDisk::of(disk)),
            json,
        };
        Ok(match command {
            DisksCommand::Create { disk, size, chunk, json } => {
                let chunk = chunk.map_or(0, |chunk| chunk.0);
                let command = DiskCommand::Create { disk: disk.disk.clone(), size: size.0, chunk };
                let order = changes(&disk, format!("creating disk {disk}"), command, json);
                order.showing(|changed| changed.size = Some(size.0))
            }
            DisksCommand::Ls { pool, json } => DiskOrder {
                doing: format!("listing the disks of pool {pool}"),
                request: DiskRequest { pool, command: DiskCommand::List },
                shows: ShownAnswer::List,
                json,
            },
            DisksCommand::Stat { disk, json } => DiskOrder {
                doing: format!("querying disk {disk}"),
                request: DiskRequest { pool: disk.pool, command: DiskCommand::Stat { disk: disk.disk } },
                shows: ShownAnswer::Disk,
                json,
            },
            DisksCommand::Rm { target, snapshots, json } => DiskOrder::removal(target, snapshots, json)?,
            DisksCommand::Resize { disk, size, shrink, json } => {
                let command = DiskCommand::Resize { disk: disk.disk.clone(), size: size.0, shrinks: shrink };
                let order = changes(&disk, format!("resizing disk {disk}"), command, json);
                order.showing(|changed| changed.size = Some(size.0))
            }
            DisksCommand::Snapshot { snapshot: path, json } => {
                let (disk, snapshot) = (path.of.disk.clone(), path.snapshot.clone());
                let command = DiskCommand::Snapshot { disk, snapshot };
                let order = changes(&path.of, format!("taking snapshot {path}"), command, json);
                order.showing(|changed| changed.snapshot = Some(path.snapshot))
            }
            DisksCommand::Clone { snapshot: path, clone, json } => {
                let doing = format!("cloning {path}");
                if clone.pool != path.of.pool {
                    let why = format!(
                        "a clone is in the pool of its snapshot; write {}/{}, or copy the data to pool {} with \
                         `outboard disk export` and `outboard disk import`",
                        path.of.pool, clone.disk, clone.pool
                    );
                    return Err(Failure::usage(doing, why));
                }
                let (disk, snapshot) = (path.of.disk.clone(), path.snapshot.clone());
                let command = DiskCommand::Clone { disk, snapshot, clone: clone.disk.clone() };
                let order = changes(&clone, doing, command, json);
                order.showing(|changed| changed.parent = Some(path.to_string()))
            }
            DisksCommand::Flatten { disk, json } => {
                let command = DiskCommand::Flatten { disk: disk.disk.clone() };
                changes(&disk, format!("flattening disk {disk}"), command, json)
            }
            DisksCommand::Usage { disk, json } => DiskOrder {
                doing: format!("querying the space of disk {disk}"),
                request: DiskRequest {
                    pool: disk.pool.clone(),
                    command: DiskCommand::Usage { disk: disk.disk.clone() },
                },
                shows: ShownAnswer::Space(disk),
                json,
            },
            DisksCommand::Attach { disk, front_end, gateway, force, read_only, json } => DiskOrder {
                doing: format!("attaching disk {disk} as {front_end}"),
                request: DiskRequest {
                    pool: disk.pool.clone(),
                    command: DiskCommand::Attach {
                        disk: disk.disk.clone(),
                        front_end,
                        gateway,
                        takes_over: force,
                        is_read_only: read_only,
                    },
                },
                shows: ShownAnswer::Attachment(disk),
                json,
            },
            DisksCommand::Detach { disk, json } => {
                let command = DiskCommand::Detach { disk: disk.disk.clone() };
                changes(&disk, format!("detaching disk {disk}"), command, json)
            }
            DisksCommand::Import(_) | DisksCommand::Export(_) => unreachable!("no gateway executes these"),
        })
    }

    fn removal(target: DiskOrSnapshot, with_snapshots: bool, json: bool) -> Result<DiskOrder> {
        let doing = format!("removing {target}");
        let DiskOrSnapshot { of: DiskPath { pool, disk }, snapshot } = target;
        let path = DiskPath { pool: pool.clone(), disk: disk.clone() };
        let changed = ChangedDisk { snapshot: snapshot.clone(), ..ChangedDisk::of(&path) };
        let command = match snapshot {
            Some(_) if with_snapshots => {
                let why =
                    "--snapshots removes a disk with all its snapshots; name the disk, or leave the flag out";
                return Err(Failure::usage(doing, why));
            }
            Some(snapshot) => DiskCommand::RemoveSnapshot { disk, snapshot },
            None => DiskCommand::Remove { disk, with_snapshots },
        };
        Ok(DiskOrder {
            request: DiskRequest { pool, command },
            doing,
            shows: ShownAnswer::Change(changed),
            json,
        })
    }

    /// Adds details to the change that the command prints.
    fn showing(mut self, add: impl FnOnce(&mut ChangedDisk)) -> DiskOrder {
        if let ShownAnswer::Change(changed) = &mut self.shows {
            add(changed);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use wire::FrontEnd;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parsed(line: &str) -> DisksCommand {
        let args = ["outboard", "disk"].into_iter().chain(line.split(' '));
        match Cli::try_parse_from(args).unwrap_or_else(|e| panic!("{line}: {e}")).command {
            Command::Disk(command) => command,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn order(line: &str) -> DiskOrder {
        DiskOrder::new(parsed(line)).unwrap()
    }

    #[test]
    fn each_command_makes_the_request_that_its_arguments_state() {
        let (disk, snapshot) = (|| "vm".to_owned(), || "s".to_owned());
        let front_end = FrontEnd::Nbd("127.0.0.1:10809".into());
        let attach = |gateway, takes_over, is_read_only, front_end| DiskCommand::Attach {
            disk: "vm".into(),
            front_end,
            gateway,
            takes_over,
            is_read_only,
        };
        for (line, expected) in [
            ("create p/vm --size 1TiB", DiskCommand::Create { disk: disk(), size: 1 << 40, chunk: 0 }),
            (
                "create p/vm --size 1GiB --chunk 1MiB",
                DiskCommand::Create { disk: disk(), size: 1 << 30, chunk: 1 << 20 },
            ),
            ("ls p", DiskCommand::List),
            ("stat p/vm", DiskCommand::Stat { disk: disk() }),
            ("rm p/vm", DiskCommand::Remove { disk: disk(), with_snapshots: false }),
            ("rm p/vm --snapshots", DiskCommand::Remove { disk: disk(), with_snapshots: true }),
            ("rm p/vm@s", DiskCommand::RemoveSnapshot { disk: disk(), snapshot: snapshot() }),
            ("resize p/vm 4096", DiskCommand::Resize { disk: disk(), size: 4096, shrinks: false }),
            ("resize p/vm 1MiB --shrink", DiskCommand::Resize { disk: disk(), size: 1 << 20, shrinks: true }),
            ("snapshot p/vm@s", DiskCommand::Snapshot { disk: disk(), snapshot: snapshot() }),
            (
                "clone p/vm@s p/new",
                DiskCommand::Clone { disk: disk(), snapshot: snapshot(), clone: "new".into() },
            ),
            ("flatten p/vm", DiskCommand::Flatten { disk: disk() }),
            ("usage p/vm", DiskCommand::Usage { disk: disk() }),
            (
                "attach p/vm --as vhost-user:/run/x",
                attach(None, false, false, FrontEnd::VhostUser("/run/x".into())),
            ),
            (
                "attach p/vm --as nbd:127.0.0.1:10809 --gateway gw --force --read-only",
                attach(Some("gw".into()), true, true, front_end),
            ),
            ("detach p/vm", DiskCommand::Detach { disk: disk() }),
        ] {
            let order = order(line);
            assert_eq!((&*order.request.pool, order.request.command), ("p", expected), "{line}");
        }
    }

    #[test]
    fn changes_are_shown_with_their_details() {
        let shown = |line: &str| match order(line).shows {
            ShownAnswer::Change(changed) => serde_json::to_string(&changed).unwrap(),
            other => panic!("{line}: {other:?}"),
        };
        assert_eq!(shown("create p/vm --size 4KiB --json"), r#"{"disk":"p/vm","size":4096}"#);
        assert_eq!(shown("rm p/vm@s"), r#"{"disk":"p/vm","snapshot":"s"}"#);
        assert_eq!(shown("clone p/vm@s p/new"), r#"{"disk":"p/new","parent":"p/vm@s"}"#);
        assert_eq!(shown("detach p/vm"), r#"{"disk":"p/vm"}"#);
    }

    #[test]
    fn contradictory_arguments_are_wrong_usage() {
        for (line, hint) in [("clone p/vm@s q/new", "p/new"), ("rm p/vm@s --snapshots", "name the disk")] {
            let refused = DiskOrder::new(parsed(line)).unwrap_err();
            assert!(refused.is_usage() && refused.why().contains(hint), "{line}: {refused}");
        }
        for line in [
            "create p/vm",
            "create vm --size 1GiB",
            "create p/vm --size big",
            "stat p/vm@s",
            "snapshot p/vm",
            "clone p/vm p/new",
            "attach p/vm",
            "attach p/vm --as nbd:nowhere",
            "import p/vm@s file",
        ] {
            let args = ["outboard", "disk"].into_iter().chain(line.split(' '));
            let refused = Cli::try_parse_from(args).unwrap_err();
            assert_eq!(refused.exit_code(), 2, "{line}: {refused}");
        }
    }

    #[test]
    fn a_reply_of_another_kind_is_refused() {
        assert!(print(DiskReply::Done, ShownAnswer::List, false).is_none());
        assert!(print(DiskReply::Disks(vec![]), ShownAnswer::Disk, false).is_none());
    }
}
