//! What this machine's own files say: NVMe controllers and who uses them, and how much memory is left. Reads only.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// The PCI class of NVMe controllers, without the programming interface.
const CLASS: &str = "0x0108";

/// An NVMe controller of this machine.
#[derive(Debug, Serialize)]
pub(crate) struct Controller {
    pub address: String,
    pub vendor: String,
    pub device: String,
    pub class: String,
    /// The kernel driver that has it, if any.
    pub driver: Option<String>,
    pub model: Option<String>,
    pub serial: Option<String>,
    pub numa_node: Option<String>,
    pub namespaces: Vec<BlockDevice>,
    /// Whether anything on it is mounted, swapped to, or held by another device.
    pub in_use: bool,
}

/// A namespace as the kernel offers it.
#[derive(Debug, Serialize)]
pub(crate) struct BlockDevice {
    pub name: String,
    pub bytes: u64,
    /// Where it, or a part of it, is mounted.
    pub mounted: Vec<String>,
    /// Devices built on it, or on a part of it: device mapper, RAID.
    pub held_by: Vec<String>,
    pub swap: bool,
}

/// Where the files are.
pub(crate) struct Roots<'a> {
    pub sys: &'a Path,
    pub proc: &'a Path,
}

impl Roots<'static> {
    /// Those of this machine.
    pub(crate) fn here() -> Self {
        Self { sys: Path::new("/sys"), proc: Path::new("/proc") }
    }
}

/// Every NVMe controller, by address; nothing where there is no PCI bus.
pub(crate) fn controllers(roots: &Roots<'_>) -> Vec<Controller> {
    let used = Used::read(roots);
    let devices = entries(&roots.sys.join("bus/pci/devices"));
    devices.iter().filter_map(|device| controller(roots, device, &used)).collect()
}

fn controller(roots: &Roots<'_>, device: &Path, used: &Used) -> Option<Controller> {
    let class = text(&device.join("class")).filter(|class| class.starts_with(CLASS))?;
    let known = entries(&device.join("nvme"));
    let of_nvme = |file: &str| known.iter().find_map(|nvme| text(&nvme.join(file)));
    let namespaces: Vec<_> =
        known.iter().flat_map(|nvme| entries(nvme)).filter_map(|ns| namespace(roots, &ns, used)).collect();
    Some(Controller {
        address: name(device),
        vendor: text(&device.join("vendor")).unwrap_or_default(),
        device: text(&device.join("device")).unwrap_or_default(),
        class,
        driver: fs::read_link(device.join("driver")).ok().map(|target| name(&target)),
        model: of_nvme("model"),
        serial: of_nvme("serial"),
        numa_node: text(&device.join("numa_node")).filter(|node| node != "-1"),
        in_use: namespaces.iter().any(|ns| ns.swap || !ns.mounted.is_empty() || !ns.held_by.is_empty()),
        namespaces,
    })
}

/// A namespace among the entries of a controller. With multipath the entry is `nvme0c0n1`, the device `nvme0n1`.
fn namespace(roots: &Roots<'_>, entry: &Path, used: &Used) -> Option<BlockDevice> {
    let own = name(entry);
    let rest = own.strip_prefix("nvme")?;
    let (controller, namespace) = rest.split_once('n')?;
    let subsystem = controller.split('c').next()?;
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !number(subsystem) || !number(namespace) {
        return None;
    }
    let head = format!("nvme{subsystem}n{namespace}");
    let at = roots.sys.join("class/block").join(&head);
    let parts: Vec<_> = entries(&at).into_iter().filter(|part| part.join("partition").exists()).collect();
    let mut device = BlockDevice {
        bytes: text(&at.join("size"))
            .and_then(|size| size.parse::<u64>().ok())
            .unwrap_or(0)
            .saturating_mul(512),
        name: head,
        mounted: Vec::new(),
        held_by: Vec::new(),
        swap: false,
    };
    for part in std::iter::once(&at).chain(&parts) {
        let (own, number) = (name(part), text(&part.join("dev")).unwrap_or_default());
        device.mounted.extend(used.mounts_of(&own, &number));
        device.held_by.extend(entries(&part.join("holders")).iter().map(|holder| name(holder)));
        device.swap |= used.swaps.contains(&format!("/dev/{own}"));
    }
    Some(device)
}

/// What the kernel says is mounted and swapped to.
struct Used {
    /// Device number, source, mount point.
    mounts: Vec<(String, String, String)>,
    swaps: Vec<String>,
}

impl Used {
    fn read(roots: &Roots<'_>) -> Self {
        let mounts = fs::read_to_string(roots.proc.join("self/mountinfo")).unwrap_or_default();
        let swaps = fs::read_to_string(roots.proc.join("swaps")).unwrap_or_default();
        Self {
            mounts: mounts.lines().filter_map(mount).collect(),
            swaps: swaps
                .lines()
                .filter_map(|line| Some(line.split_whitespace().next()?.to_owned()))
                .collect(),
        }
    }

    fn mounts_of<'a>(&'a self, name: &str, number: &'a str) -> impl Iterator<Item = String> + 'a {
        // File systems on several devices (btrfs) have a device number of their own: the source tells.
        let source = format!("/dev/{name}");
        self.mounts.iter().filter(move |(dev, from, _)| dev == number || *from == source).map(|m| m.2.clone())
    }
}

/// A line of mountinfo: `ID PARENT MAJOR:MINOR ROOT MOUNTPOINT OPTIONS … - TYPE SOURCE …`.
fn mount(line: &str) -> Option<(String, String, String)> {
    let (front, back) = line.split_once(" - ")?;
    let front: Vec<_> = front.split(' ').collect();
    let source = back.split(' ').nth(1)?;
    Some(((*front.get(2)?).to_owned(), source.to_owned(), (*front.get(4)?).to_owned()))
}

/// Bytes of memory that this machine could give away; unknown where it does not say.
pub(crate) fn memory_available() -> Option<u64> {
    let all = fs::read_to_string("/proc/meminfo").ok()?;
    let line = all.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What a directory holds, by name; nothing where there is none.
fn entries(at: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> =
        fs::read_dir(at).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
    found.sort();
    found
}

fn text(at: &Path) -> Option<String> {
    fs::read_to_string(at).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, file: &str, text: &str) {
        let at = root.join(file);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        fs::write(at, text).unwrap();
    }

    fn machine(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("onehop-sysfs-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for (bdf, class) in
            [("0000:01:00.0", "0x010802"), ("0000:02:00.0", "0x030000"), ("0000:03:00.0", "0x010802")]
        {
            let at = format!("sys/bus/pci/devices/{bdf}");
            put(&root, &format!("{at}/class"), class);
            put(&root, &format!("{at}/vendor"), "0x144d\n");
            put(&root, &format!("{at}/device"), "0xa80a\n");
        }
        put(&root, "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/serial", "S1  \n");
        put(&root, "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/nvme0c0n1/size", "8\n");
        put(&root, "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/ng0n1/dev", "1:1\n");
        put(&root, "sys/class/block/nvme0n1/size", "2048\n");
        put(&root, "sys/class/block/nvme0n1/dev", "259:0\n");
        put(&root, "sys/class/block/nvme0n1/nvme0n1p1/partition", "1\n");
        put(&root, "sys/class/block/nvme0n1/nvme0n1p1/dev", "259:1\n");
        put(&root, "sys/class/block/nvme0n1/nvme0n1p1/holders/dm-0/x", "");
        put(&root, "proc/swaps", "Filename Type\n/dev/sda1 partition\n");
        put(&root, "proc/self/mountinfo", "1 0 259:1 / /data rw - ext4 /dev/x rw\nnonsense\n");
        root
    }

    #[test]
    fn finds_controllers_and_their_users() {
        let root = machine("users");
        let found = controllers(&Roots { sys: &root.join("sys"), proc: &root.join("proc") });
        assert_eq!(found.len(), 2);
        let first = &found[0];
        assert_eq!((first.address.as_str(), first.serial.as_deref()), ("0000:01:00.0", Some("S1")));
        let ns = &first.namespaces[0];
        assert_eq!((first.namespaces.len(), ns.name.as_str(), ns.bytes), (1, "nvme0n1", 1 << 20));
        assert_eq!((&ns.mounted[..], &ns.held_by[..]), (&["/data".into()][..], &["dm-0".into()][..]));
        assert!(first.in_use && !ns.swap);
        assert!(!found[1].in_use && found[1].driver.is_none());
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_machine_without_pci_has_none() {
        let nowhere = Path::new("/nonexistent");
        assert!(controllers(&Roots { sys: nowhere, proc: nowhere }).is_empty());
    }
}
