//! Users of an NVMe drive. All safety rules for real drives are here: [`Usage::refusal`] says why a drive must not be
//! detached from the kernel.

use std::collections::BTreeSet;
use std::path::Path;

use rustix::fs::FileType;
use serde::Serialize;

use crate::asked::{ExclusiveUse, claim};
use crate::open_handles::{OpenHandles, character};
use crate::root::if_there;
use crate::{Address, Class, Error, Result, Root, programs};

/// The PCI class of NVMe controllers, without the programming interface.
pub const CLASS: u16 = 0x0108;
/// Upper limit of the mount table.
const MAX_MOUNTS: usize = 4 << 20;
/// Mount points that make a drive the boot drive.
const BOOT: [&str; 5] = ["/", "/boot", "/boot/efi", "/efi", "/usr"];

/// An NVMe controller of this machine and its users.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Its address.
    pub address: Address,
    /// The vendor's ID.
    pub vendor: String,
    /// The device's ID.
    pub device: String,
    /// Its class: NVMe with any programming interface.
    pub class: Class,
    /// The bound kernel driver, if any.
    pub driver: Option<String>,
    /// The model, as the kernel's driver reports it.
    pub model: Option<String>,
    /// The serial number, as the kernel's driver reports it.
    pub serial: Option<String>,
    /// Its NUMA node.
    pub numa_node: Option<String>,
    /// Its namespaces, as block devices of the kernel.
    pub namespaces: Vec<BlockDevice>,
    /// Programs that have the controller's file open, and exports of the whole controller.
    pub opened_by: Vec<String>,
    /// Programs that drive it themselves, through VFIO or UIO.
    pub driven_by: Vec<String>,
    /// Whether anything on it is mounted, used for swap, or held by another device or program.
    pub in_use: bool,
    /// What could not be checked, with the reason for each: it may have users that were not found.
    #[serde(rename = "untold")]
    pub undetermined: Vec<String>,
    /// What of that leaves users through the kernel's driver unknown.
    #[serde(skip)]
    kernel_undetermined: Vec<String>,
}

/// A namespace as a block device of the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BlockDevice {
    /// Its name, such as `nvme0n1`.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Where it, or a part of it, is mounted.
    pub mounted: Vec<String>,
    /// Devices built on it, or on a part of it: device mapper, RAID, loop devices.
    pub held_by: Vec<String>,
    /// Whether it, or a part of it, is used for swap.
    pub swap: bool,
    /// The namespace or partition that is in exclusive use for any reason.
    pub claimed: Option<String>,
    /// Programs that have it, or a part of it, open without excluding others.
    pub opened_by: Vec<String>,
}

impl BlockDevice {
    fn in_use(&self) -> bool {
        self.is_taken() || !self.opened_by.is_empty()
    }

    fn is_taken(&self) -> bool {
        self.swap || !self.mounted.is_empty() || !self.held_by.is_empty() || self.claimed.is_some()
    }

    /// Its users, in words.
    fn users(&self) -> Vec<String> {
        let name = &self.name;
        let mut users = Vec::new();
        if let Some(at) = self.mounted.iter().find(|at| BOOT.contains(&at.as_str())) {
            users.push(format!("this system runs from {name} (mounted on {at})"));
        } else if !self.mounted.is_empty() {
            users.push(format!("{name} is mounted on {}", self.mounted.join(", ")));
        }
        if !self.held_by.is_empty() {
            users.push(format!("{name} is held by {}", self.held_by.join(", ")));
        }
        if self.swap {
            users.push(format!("{name} is used for swap"));
        }
        if let Some(claimed) = self.claimed.as_ref().filter(|_| users.is_empty()) {
            users.push(format!("{claimed} is mounted, held or exclusively open elsewhere"));
        }
        if !self.opened_by.is_empty() {
            users.push(format!("{name} is open in {}", self.opened_by.join(", ")));
        }
        users
    }
}

impl Usage {
    /// All NVMe controllers, by address; empty if there is no PCI bus.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn all(root: &Root) -> Result<Vec<Self>> {
        let used = Mounts::read(root)?;
        let names = match root.list("/sys/bus/pci/devices") {
            Err(error) if error.is_missing() => return Ok(Vec::new()),
            names => names?,
        };
        let addresses = names.iter().filter_map(|name| name.parse().ok());
        let found = addresses.map(|address| Self::read(root, address, &used));
        found.filter_map(Result::transpose).collect()
    }

    /// Describes one controller.
    ///
    /// # Errors
    /// When it does not exist, is not an NVMe controller, or cannot be read.
    pub fn of(root: &Root, address: Address) -> Result<Self> {
        let used = Mounts::read(root)?;
        Self::read(root, address, &used)?.ok_or_else(|| no_nvme(address))
    }

    fn read(root: &Root, address: Address, used: &Mounts) -> Result<Option<Self>> {
        let folder = format!("/sys/bus/pci/devices/{address}");
        let class = root.text(&format!("{folder}/class"))?;
        let Some(class) = crate::bar::hex(&class).map(|value| Class(value as u32 & 0xff_ffff)) else {
            return Err(Error::garbage(&format!("{folder}/class"), &class, "class"));
        };
        if class.kind() != CLASS {
            return Ok(None);
        }
        let text = |name: &str| root.text(&format!("{folder}/{name}")).ok().filter(|text| !text.is_empty());
        let mut reader = UsageReader { root, used, undetermined: Vec::new() };
        let known = reader.list(&format!("{folder}/nvme"));
        let of_nvme = |file: &str| known.iter().find_map(|nvme| text(&format!("nvme/{nvme}/{file}")));
        let entries = known.iter().flat_map(|nvme| reader.list(&format!("{folder}/nvme/{nvme}")));
        let heads: BTreeSet<_> = entries.filter_map(|entry| head(&entry)).collect();
        let namespaces: Vec<_> = heads.into_iter().map(|head| reader.namespace(head)).collect();
        let own = |nvme: &String| character(&reader.text(&format!("{folder}/nvme/{nvme}/dev")));
        let numbers: Vec<_> = known.iter().map(own).collect();
        let opened_by: Vec<_> = numbers.iter().flat_map(|number| used.open_handles.of(number)).collect();
        let driven_by = reader.keep(programs::named(root, address, &used.open_handles));
        let unseen = &used.open_handles.unseen;
        if !known.is_empty() {
            reader.undetermined.extend(unseen.iter().cloned());
        }
        let functions = reader.text(&format!("{folder}/sriov_numvfs"));
        if !matches!(&*functions, "" | "0") {
            reader.undetermined.push(format!(
                "{functions} virtual functions are enabled, which a reset takes from their users"
            ));
        }
        let in_use =
            namespaces.iter().any(BlockDevice::in_use) || !opened_by.is_empty() || !driven_by.is_empty();
        let driver = root.link_name(&format!("{folder}/driver"));
        let kernel_undetermined = reader.undetermined.clone();
        // Another driver than the kernel's hands it to programs, which may be out of sight, too.
        if known.is_empty() && driver.is_some() {
            reader.undetermined.extend(unseen.iter().cloned());
        }
        Ok(Some(Self {
            address,
            vendor: text("vendor").unwrap_or_default(),
            device: text("device").unwrap_or_default(),
            class,
            driver,
            model: of_nvme("model"),
            serial: of_nvme("serial"),
            numa_node: text("numa_node").filter(|node| node != "-1"),
            opened_by,
            driven_by,
            in_use,
            undetermined: reader.undetermined,
            kernel_undetermined,
            namespaces,
        }))
    }

    /// Another controller of the same drive that has users, or may have some: a port of its own, or a function. They have
    /// the blocks of this one.
    #[must_use]
    pub fn other_path<'a>(all: &'a [Self], own: Address, serial: &str, model: &str) -> Option<&'a Self> {
        let is_it = |usage: &&Self| {
            usage.serial.as_deref().map(str::trim) == Some(serial.trim())
                && usage.model.as_deref().map(str::trim) == Some(model.trim())
        };
        all.iter()
            .filter(|usage| usage.address != own)
            .filter(is_it)
            .find(|usage| usage.in_use || !usage.undetermined.is_empty())
    }

    /// Whether the reason for a refusal may soon be gone: a program such as udev has the drive open, or the drive is so
    /// new that its device file is missing.
    pub(crate) fn may_pass(&self) -> bool {
        !self.namespaces.iter().any(BlockDevice::is_taken)
    }

    /// Its users, in words; `None` if it has none.
    #[must_use]
    pub fn users(&self) -> Option<String> {
        let mut users = self.kernel_users();
        users.extend(programs::in_words(&self.driven_by));
        (!users.is_empty()).then(|| users.join("; "))
    }

    /// Its users through the kernel's driver, in words.
    fn kernel_users(&self) -> Vec<String> {
        let mut users: Vec<_> = self.namespaces.iter().flat_map(BlockDevice::users).collect();
        if !self.opened_by.is_empty() {
            users.push(format!("its controller's file is open in {}", self.opened_by.join(", ")));
        }
        users
    }

    /// Why it must not be detached from the kernel; `None` if it is certain to have no users through the kernel's
    /// driver. User-space drivers are checked elsewhere, because those of onehop hold the drive's lock.
    #[must_use]
    pub fn refusal(&self) -> Option<Error> {
        let users = self.kernel_users();
        if !users.is_empty() {
            let fix = "Unmount it, or stop its users; a system drive cannot be used";
            return Some(refused(self.address, users.join("; "), fix));
        }
        (!self.kernel_undetermined.is_empty())
            .then(|| undetermined(self.address, &self.kernel_undetermined.join("; ")))
    }
}

/// Fails if the device is not an NVMe controller. This is checked before anything else.
pub(crate) fn ensure_nvme(root: &Root, address: Address) -> Result<()> {
    let path = format!("/sys/bus/pci/devices/{address}/class");
    let text = root.text(&path)?;
    let class = crate::bar::hex(&text).ok_or_else(|| Error::garbage(&path, &text, "class"))?;
    if Class(class as u32 & 0xff_ffff).kind() == 0x0108 { Ok(()) } else { Err(no_nvme(address)) }
}

fn no_nvme(address: Address) -> Error {
    Error::Refused {
        what: format!("driving {address} as an NVMe drive"),
        why: "it is another kind of device (its class is not 0x0108)".into(),
        fix: "`onehop drive list` shows this machine's drives".into(),
    }
}

pub(crate) fn refused(address: Address, why: String, fix: &str) -> Error {
    Error::Refused { what: format!("detaching {address} from the kernel"), why, fix: fix.into() }
}

pub(crate) fn undetermined(address: Address, why: &str) -> Error {
    refused(
        address,
        format!("cannot determine whether it is in use ({why})"),
        "Run as root and not in a container, or have root run `onehop drive bind` once: the device's files must be in /dev, \
         and its files in /sys readable",
    )
}

/// The block device of a controller's entry: `nvme0n1`, which with multipath is listed as `nvme0c0n1`.
fn head(entry: &str) -> Option<String> {
    let (controller, namespace) = entry.strip_prefix("nvme")?.split_once('n')?;
    let subsystem = controller.split('c').next()?;
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    (number(subsystem) && number(namespace)).then(|| format!("nvme{subsystem}n{namespace}"))
}

/// Collects facts about a drive, and what could not be read.
struct UsageReader<'a> {
    root: &'a Root,
    used: &'a Mounts,
    undetermined: Vec<String>,
}

impl UsageReader<'_> {
    /// A missing value is the default; an unreadable one is recorded as unknown.
    fn keep<T: Default>(&mut self, found: Result<T>) -> T {
        if_there(found).unwrap_or_else(|error| {
            self.undetermined.push(error.to_string());
            T::default()
        })
    }

    fn list(&mut self, path: &str) -> Vec<String> {
        self.keep(self.root.list(path))
    }

    fn text(&mut self, path: &str) -> String {
        self.keep(self.root.text(path))
    }

    fn namespace(&mut self, name: String) -> BlockDevice {
        let (root, used) = (self.root, self.used);
        let at = format!("/sys/class/block/{name}");
        let sectors = root.text(&format!("{at}/size")).ok().and_then(|size| size.parse::<u64>().ok());
        let is_part = |part: &String| root.exists(&format!("{at}/{part}/partition"));
        let parts: Vec<_> = self.list(&at).into_iter().filter(is_part).collect();
        let mut device = BlockDevice {
            bytes: sectors.unwrap_or(0).saturating_mul(512),
            mounted: Vec::new(),
            held_by: Vec::new(),
            swap: false,
            claimed: None,
            opened_by: Vec::new(),
            name,
        };
        // The character device next to it, which programs use for commands.
        let generic = device.name.replacen("nvme", "ng", 1);
        let number = self.text(&format!("/sys/class/nvme-generic/{generic}/dev"));
        device.opened_by.extend(used.open_handles.of(&character(&number)));
        let places = std::iter::once((device.name.clone(), at.clone()))
            .chain(parts.into_iter().map(|part| (part.clone(), format!("{at}/{part}"))));
        for (own, folder) in places {
            let number = self.text(&format!("{folder}/dev"));
            device.mounted.extend(used.of(&own, &number));
            device.held_by.extend(self.list(&format!("{folder}/holders")));
            device.held_by.extend(
                used.loops
                    .iter()
                    .filter(|(_, file)| *file == format!("/dev/{own}"))
                    .map(|(name, _)| name.clone()),
            );
            device.opened_by.extend(used.open_handles.of(&number));
            device.swap |= used.swaps.contains(&format!("/dev/{own}"));
            // A hidden namespace has no block device that could be used.
            if number.is_empty() && self.text(&format!("{folder}/hidden")) == "1" {
                continue;
            }
            let ask = || claim(&Path::new("/dev").join(&own), FileType::BlockDevice, &number);
            match root.answer(&format!("claimed:{own}"), ask) {
                Some(ExclusiveUse::Known(true)) => drop(device.claimed.get_or_insert(own)),
                Some(ExclusiveUse::Unknown(why)) => self.undetermined.push(why),
                Some(ExclusiveUse::Known(false)) | None => {}
            }
        }
        device.opened_by.sort();
        device.opened_by.dedup();
        device
    }
}

/// What the kernel lists as mounted, used for swap, and open.
struct Mounts {
    /// Device number, source, mount point.
    list: Vec<(String, String, String)>,
    swaps: Vec<String>,
    /// Loop devices and their backing files, which the kernel does not count as holders of a device.
    loops: Vec<(String, String)>,
    open_handles: OpenHandles,
}

impl Mounts {
    /// Fails without the mount table: a drive may not be assumed to be unused.
    fn read(root: &Root) -> Result<Self> {
        let path = "/proc/self/mountinfo";
        let mounts = root.bytes(path, MAX_MOUNTS)?;
        let mounts = String::from_utf8_lossy(&mounts);
        let list: Vec<_> = mounts.lines().filter_map(mount).collect();
        if list.is_empty() && !mounts.trim().is_empty() {
            return Err(Error::garbage(path, &mounts, "list of mounts"));
        }
        // A kernel without swap has no such file.
        let swaps = if_there(root.text("/proc/swaps"))?;
        Ok(Self {
            list,
            swaps: swaps
                .lines()
                .filter_map(|line| Some(line.split_whitespace().next()?.to_owned()))
                .collect(),
            loops: loops(root)?,
            open_handles: OpenHandles::read(root),
        })
    }

    fn of<'a>(&'a self, name: &str, number: &'a str) -> impl Iterator<Item = String> + 'a {
        // File systems on several devices (btrfs) have a device number of their own, so the source is compared.
        let source = format!("/dev/{name}");
        self.list.iter().filter(move |(dev, from, _)| dev == number || *from == source).map(|m| m.2.clone())
    }
}

fn loops(root: &Root) -> Result<Vec<(String, String)>> {
    let names = if_there(root.list("/sys/class/block"))?;
    let file = |name: String| {
        let file = if_there(root.text(&format!("/sys/class/block/{name}/loop/backing_file")))?;
        Ok((name, file))
    };
    names.into_iter().filter(|name| name.starts_with("loop")).map(file).collect()
}

/// A line of mountinfo: `ID PARENT MAJOR:MINOR ROOT MOUNTPOINT OPTIONS … - TYPE SOURCE …`.
fn mount(line: &str) -> Option<(String, String, String)> {
    let (front, back) = line.split_once(" - ")?;
    let front: Vec<_> = front.split(' ').collect();
    let source = back.split(' ').nth(1)?;
    Some(((*front.get(2)?).to_owned(), source.to_owned(), (*front.get(4)?).to_owned()))
}

#[cfg(test)]
#[path = "nvme_tests.rs"]
mod tests;
