//! Removes what identifies this machine or its owner from published reports: names, serial numbers, hardware
//! identifiers, file paths.

use std::cell::Cell;
use std::net::ToSocketAddrs;

use onehop_pci::{Root, Usage};
use serde_json::Value;

/// Fields whose values identify a piece of hardware.
const ID_FIELDS: [&str; 6] = ["serial", "subsystem_nqn", "nguid", "eui64", "wwid", "uuid"];
/// Files with the names of this machine.
const HOST_FILES: [&str; 3] = ["/proc/sys/kernel/hostname", "/proc/sys/kernel/domainname", "/etc/hostname"];
/// Files with identifiers of this machine, most of them readable only by root.
const ID_FILES: [&str; 5] = [
    "/etc/machine-id",
    "/sys/class/dmi/id/product_serial",
    "/sys/class/dmi/id/product_uuid",
    "/sys/class/dmi/id/board_serial",
    "/sys/class/dmi/id/chassis_serial",
];
/// Environment variables with user names.
const USER_VARIABLES: [&str; 3] = ["USER", "LOGNAME", "SUDO_USER"];
/// Fields with fixed values, which are never replaced.
const FIXED_FIELDS: [&str; 8] = ["class", "direction", "group", "id", "kind", "route", "status", "verdict"];
/// Common names, which identify no machine or user.
const COMMON_NAMES: [&str; 13] = [
    "root",
    "user",
    "ubuntu",
    "debian",
    "linux",
    "localhost",
    "localdomain",
    "(none)",
    "host",
    "server",
    "pc",
    "vm",
    "gpu",
];
/// Common mount points, and prefixes of system mount points.
const COMMON_MOUNTS: [&str; 9] = ["/", "/boot", "/efi", "/home", "/mnt", "/opt", "/srv", "/tmp", "/var"];
const SYSTEM_MOUNTS: [&str; 7] = ["/boot/", "/dev", "/etc/", "/proc", "/run", "/sys", "/usr"];
/// Serial numbers of at least this length are replaced within words too, such as NVMe qualified names.
const MIN_WITHIN_WORD: usize = 6;
/// Maximum size of a file with names, such as the mount table.
const MAX_FILE: usize = 4 << 20;

/// The texts to replace, and their replacements.
#[derive(Default)]
pub(super) struct Private {
    /// The longest first, because one may contain another.
    secrets: Vec<Secret>,
    removed: Cell<u64>,
}

struct Secret {
    /// In lower case.
    text: String,
    label: &'static str,
    /// Whether it is replaced within words too.
    within_words: bool,
}

impl Private {
    /// Collects what identifies this machine.
    pub(super) fn of_this_machine() -> Self {
        let user = rustix::process::getuid().as_raw();
        Self::of(&Root::here(), user, |name| std::env::var(name).unwrap_or_default())
    }

    /// Collects what identifies a machine, for a user with these environment variables.
    pub(super) fn of(root: &Root, user: u32, variable: impl Fn(&str) -> String) -> Self {
        let mut private = Self::default();
        let read = |path: &str| {
            let bytes = root.bytes(path, MAX_FILE).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        for name in HOST_FILES.map(read) {
            private.add(&name, "[host]");
            private.add(name.split('.').next().unwrap_or_default(), "[host]");
        }
        // Boards without a serial number have text there, such as "Default string".
        for id in ID_FILES.map(read).iter().filter(|id| !id.trim().contains(' ')) {
            private.add(id, SERIAL);
        }
        for drive in Usage::all(root).unwrap_or_default() {
            private.add(drive.serial.as_deref().unwrap_or_default(), SERIAL);
        }
        for name in USER_VARIABLES.map(&variable) {
            private.add(&name, "[user]");
        }
        let user = user.to_string();
        let users = read("/etc/passwd");
        for fields in users.lines().map(|line| line.split(':').collect::<Vec<_>>()) {
            if let [name, _, id, _, _, home, ..] = fields[..]
                && id == user
            {
                private.add(name, "[user]");
                private.add_folder(home, "[home]");
            }
        }
        private.add_folder(&variable("HOME"), "[home]");
        for line in read("/proc/self/mountinfo").lines() {
            let point = line.split(' ').nth(4).unwrap_or_default().replace("\\040", " ");
            private.add_folder(&point, "[mount]");
        }
        private
    }

    /// Adds hosts, NQNs and paths in the name of a drive.
    pub(super) fn add_drive_name(&mut self, drive: &str) {
        let Some((_, target)) = drive.split_once("://") else {
            let (name, options) = drive.split_once('?').unwrap_or((drive, ""));
            let (scheme, place) = name.split_once(':').unwrap_or((name, ""));
            // Other names of simulated drives and PCI devices contain no paths.
            let has_paths = match scheme {
                "sim" => !place.starts_with("mem:") && place != "usdr",
                "qtest" | "vfio-user" => true,
                _ => false,
            };
            let paths = place.split(',').filter(|part| has_paths && !part.contains('='));
            let more = options.split(['&', '=']).filter(|value| value.contains('/'));
            return paths.chain(more).for_each(|path| self.add(path, "[path]"));
        };
        let (target, options) = target.split_once('?').unwrap_or((target, ""));
        let (address, nqn) = target.split_once('/').unwrap_or((target, ""));
        let host = match address.strip_prefix('[') {
            Some(v6) => v6.split(']').next(),
            None => address.split(':').next(),
        };
        let host = host.unwrap_or_default();
        self.add(host, "[host]");
        // Error messages contain the host's address.
        for address in (host, 0).to_socket_addrs().into_iter().flatten() {
            self.add(&address.ip().to_string(), "[host]");
        }
        self.add(nqn, "[nqn]");
        for (name, value) in options.split('&').filter_map(|option| option.split_once('=')) {
            match name {
                "dhchap" | "dhchap-ctrl" => self.add(value, "[path]"),
                _ if name.starts_with("host") => self.add(value, "[nqn]"),
                _ => {}
            }
        }
    }

    /// Adds the identifiers in a JSON document.
    pub(super) fn add_document(&mut self, document: &Value) {
        match document {
            Value::Object(fields) => fields.iter().for_each(|(name, value)| match value {
                Value::String(text) if ID_FIELDS.contains(&name.as_str()) => self.add(text, SERIAL),
                value => self.add_document(value),
            }),
            Value::Array(list) => list.iter().for_each(|value| self.add_document(value)),
            _ => {}
        }
    }

    /// The number of removals so far.
    pub(super) fn removed(&self) -> u64 {
        self.removed.get()
    }

    fn add(&mut self, text: &str, label: &'static str) {
        let text = text.trim().to_ascii_lowercase();
        let is_meaningless = text.len() < 2 || text.bytes().all(|b| matches!(b, b'0' | b'-' | b':'));
        if is_meaningless || COMMON_NAMES.contains(&&*text) || self.secrets.iter().any(|s| s.text == text) {
            return;
        }
        let within_words = label == SERIAL && text.len() >= MIN_WITHIN_WORD;
        self.secrets.push(Secret { text, label, within_words });
        self.secrets.sort_by_key(|secret| std::cmp::Reverse(secret.text.len()));
    }

    fn add_folder(&mut self, path: &str, label: &'static str) {
        let path = path.trim_end_matches('/');
        let is_system = SYSTEM_MOUNTS.iter().any(|folder| path.starts_with(folder));
        if path.starts_with('/') && !is_system && !COMMON_MOUNTS.contains(&path) {
            self.add(path, label);
        }
    }

    /// Removes what identifies the machine from a JSON document.
    pub(super) fn clean(&self, document: &mut Value) {
        match document {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value {
                        Value::String(text) if ID_FIELDS.contains(&name.as_str()) && !text.is_empty() => {
                            self.count();
                            SERIAL.clone_into(text);
                        }
                        Value::String(_) if FIXED_FIELDS.contains(&name.as_str()) => {}
                        value => self.clean(value),
                    }
                }
            }
            Value::Array(list) => list.iter_mut().for_each(|value| self.clean(value)),
            Value::String(text) => *text = self.text(text),
            _ => {}
        }
    }

    /// Removes what identifies the machine from a text.
    pub(super) fn text(&self, text: &str) -> String {
        let known = self.secrets.iter().fold(text.to_owned(), |text, secret| self.without(&text, secret));
        self.without_ids(&self.without_users(&known))
    }

    fn count(&self) {
        self.removed.set(self.removed.get() + 1);
    }

    fn without(&self, text: &str, secret: &Secret) -> String {
        let lower = text.to_ascii_lowercase();
        let (mut out, mut done) = (String::with_capacity(text.len()), 0);
        for (at, found) in lower.match_indices(&secret.text) {
            let end = at + found.len();
            let (before, after) = (text[..at].chars().next_back(), text[end..].chars().next());
            let is_word =
                !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric);
            if secret.within_words || is_word {
                self.count();
                out.push_str(&text[done..at]);
                out.push_str(secret.label);
                done = end;
            }
        }
        out + &text[done..]
    }

    /// Removes user names in paths of home directories.
    fn without_users(&self, text: &str) -> String {
        let mut parts = text.split("/home/");
        let mut out = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let name = part.find(|c: char| !c.is_alphanumeric() && !"._-".contains(c)).unwrap_or(part.len());
            out.push_str("/home/");
            if name > 0 {
                self.count();
                out.push_str("[user]");
            }
            out.push_str(&part[name..]);
        }
        out
    }

    /// Removes UUIDs, MAC addresses, InfiniBand GUIDs and EUIs, recognised by their form.
    fn without_ids(&self, text: &str) -> String {
        let bytes = text.as_bytes();
        let (mut out, mut done, mut at) = (String::with_capacity(text.len()), 0, 0);
        while at < bytes.len() {
            if !bytes[at].is_ascii_alphanumeric() {
                at += 1;
                continue;
            }
            let word = &bytes[at..];
            match id_length(word) {
                Some(length) => {
                    self.count();
                    out.push_str(&text[done..at]);
                    out.push_str("[id]");
                    at += length;
                    done = at;
                }
                None => at += word.iter().take_while(|b| b.is_ascii_alphanumeric()).count(),
            }
        }
        out + &text[done..]
    }
}

const SERIAL: &str = "[serial]";

/// The length of the identifier at the start of `bytes`, if there is one.
fn id_length(bytes: &[u8]) -> Option<usize> {
    let run =
        |from: usize| bytes[from.min(bytes.len())..].iter().take_while(|b| b.is_ascii_hexdigit()).count();
    let ends = |at: usize| !bytes.get(at).is_some_and(u8::is_ascii_alphanumeric);
    let uuid = {
        let (mut at, mut is) = (0, true);
        for (part, length) in [8, 4, 4, 4, 12].into_iter().enumerate() {
            is &= part == 0 || bytes.get(at) == Some(&b'-');
            at += usize::from(part > 0);
            is &= run(at) == length;
            at += length;
        }
        (is && ends(at)).then_some(at)
    };
    // At least six bytes, or four pairs of bytes, with separators.
    let groups = |length: usize, least: usize| {
        let separator = *bytes.get(length).filter(|separator| matches!(separator, b':' | b'-'))?;
        let (mut at, mut count) = (0, 0);
        while run(at) == length {
            count += 1;
            at += length;
            if bytes.get(at) != Some(&separator) || run(at + 1) != length {
                break;
            }
            at += 1;
        }
        (count >= least && ends(at)).then_some(at)
    };
    // A number of at least the length of an EUI-64. Bus addresses begin with 0x, which does not match.
    let long = (run(0) >= 16 && ends(run(0))).then(|| run(0));
    uuid.or_else(|| groups(2, 6)).or_else(|| groups(4, 4)).or(long)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn private() -> Private {
        let mut private = Private::default();
        private.add("build-7.example.org\n", "[host]");
        private.add("build-7", "[host]");
        private.add("ada", "[user]");
        private.add_folder("/srv/weights/", "[mount]");
        private.add("root", "[user]");
        private.add("0000", SERIAL);
        private.add_document(
            &json!({ "drive": { "serial": " S6XYNS0T1 " }, "namespaces": [{ "eui64": "0000000000000000" }] }),
        );
        private
    }

    #[test]
    fn names_and_numbers_are_removed() {
        let private = private();
        for (text, clean) in [
            ("on Build-7.example.org.", "on [host]."),
            ("build-7: 0000:0b:00.0 needs root", "[host]: 0000:0b:00.0 needs root"),
            ("/dev/mapper/build-7--vg", "/dev/mapper/[host]--vg"),
            ("adam is not ada's", "adam is not [user]'s"),
            ("mounted at /srv/weights/a, /srv/weights2", "mounted at [mount]/a, /srv/weights2"),
            ("nqn:144dS6XYNS0T1x", "nqn:144d[serial]x"),
            ("in /home/eve/x and /home/eve", "in /home/[user]/x and /home/[user]"),
            ("GPU-5fd4f087-86f3-7a43-b711-4771313afc50,", "GPU-[id],"),
            ("mac 04:42:1a:00:ff:fe up", "mac [id] up"),
            ("gid fe80:0000:0000:0000:0442:1aff:fe00:0001", "gid [id]"),
            ("eui.0025385b71b00c31", "eui.[id]"),
        ] {
            assert_eq!(private.text(text), clean);
        }
        assert!(private.removed() >= 12, "{}", private.removed());
    }

    #[test]
    fn names_in_drive_names_are_removed() {
        for (name, text, clean) in [
            (
                "nvme-tcp://store7:4420/nqn.2026-11.com.corp:models?reconnect=1&hostnqn=nqn.x:me",
                "store7:4420, nqn.2026-11.com.corp:models for nqn.x:me, within 1 s",
                "[host]:4420, [nqn] for [nqn], within 1 s",
            ),
            (
                "nvme-tcp://store7/nqn.x?dhchap=/etc/acme/a.secret&dhchap-ctrl=acme.b",
                "the secret in /etc/acme/a.secret cannot be used, nor acme.b",
                "the secret in [path] cannot be used, nor [path]",
            ),
            ("nvme-tcp://[fd00::7]:4420/nqn.x", "[fd00::7]:4420/nqn.x", "[[host]]:4420/[nqn]"),
            ("sim:/srv/secret/my disk.img?cmb=16M", "sim:/srv/secret/my disk.img", "sim:[path]"),
            ("qtest:/run/q.sock,/dev/shm/ram", "read /dev/shm/ram by /run/q.sock", "read [path] by [path]"),
            ("0000:0b:00.0", "0000:0b:00.0 is a drive", "0000:0b:00.0 is a drive"),
            ("sim:mem:64M", "sim:mem:64M of mem", "sim:mem:64M of mem"),
            ("sim:acme.img?cmb=16M", "sim:acme.img holds nothing", "sim:[path] holds nothing"),
            ("vfio-user:acme.sock", "no server at acme.sock", "no server at [path]"),
            (
                "nvme-tcp://[::ffff:10.1.2.3]:4420/nqn.x",
                "no connection to [::ffff:10.1.2.3]:4420",
                "no connection to [[host]]:4420",
            ),
            (
                "nvme-tcp://127.1:4420/nqn.x",
                "no connection to 127.0.0.1:4420",
                "no connection to [host]:4420",
            ),
        ] {
            let mut private = Private::default();
            private.add_drive_name(name);
            assert_eq!(private.text(text), clean);
        }
    }

    #[test]
    fn diagnostic_facts_are_kept() {
        let private = private();
        for text in [
            "0000:0b:00.0 behind 0000:00:01.1",
            "BAR1 at 0x0000220000000000, 128 GiB",
            "Linux 6.12.1-arch1-1, driver 580.95.05, at 18:20:21 on 2026-11-25",
            "gpu/tier3: vram-write, 4096 bytes; NVIDIA H100 80GB HBM3 äöü",
            "",
        ] {
            assert_eq!(private.text(text), text);
        }
        assert_eq!(private.removed(), 0);
    }

    #[test]
    fn documents_are_cleaned_by_field_and_by_text() {
        let mut document = json!({
            "serial": "SHORT", "nguid": "", "drive": "sim:/home/ada/a.img", "list": [{ "why": "ada has it", "id": "place.ada" }], "count": 7,
        });
        private().clean(&mut document);
        let clean = json!({
            "serial": "[serial]", "nguid": "", "drive": "sim:/home/[user]/a.img", "list": [{ "why": "[user] has it", "id": "place.ada" }],
            "count": 7,
        });
        assert_eq!(document, clean);
    }

    #[test]
    fn names_of_this_machine_are_replaced() {
        let name = std::fs::read_to_string(HOST_FILES[0]).unwrap();
        let name = name.trim();
        let text = Private::of_this_machine().text(&format!("on {name} here"));
        assert!(name.len() < 2 || COMMON_NAMES.contains(&name) || text == "on [host] here", "{text}");
    }
}
