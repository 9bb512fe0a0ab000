//! cuFile: its library and configuration.

use onehop_pci::Root;

/// Usual folders of the library. `ldconfig` may list others.
const LIBRARY_FOLDERS: [&str; 6] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
];
const CONFIG_FILE: &str = "/etc/cufile.json";

/// Facts about cuFile.
#[derive(Clone, Debug, Default)]
pub struct Cufile {
    /// Path of the library.
    pub library: Option<String>,
    /// The version of the kernel module nvidia-fs.
    pub nvidia_fs: Option<String>,
    /// Whether its configuration enables the kernel's P2PDMA.
    pub use_p2pdma: bool,
}

impl Cufile {
    pub(super) fn read(root: &Root) -> Self {
        let files = LIBRARY_FOLDERS.iter().map(|folder| format!("{folder}/libcufile.so.0"));
        let config = root.text(CONFIG_FILE).unwrap_or_default();
        Self {
            library: files.into_iter().find(|path| root.exists(path)),
            nvidia_fs: root.text("/proc/driver/nvidia-fs/version").ok(),
            use_p2pdma: is_on(&config, "use_pci_p2pdma"),
        }
    }
}

/// Whether a key of the configuration, which is JSON with comments, is true.
fn is_on(text: &str, key: &str) -> bool {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.into_iter().any(|line| {
        let found = line.split_once(&format!("\"{key}\"")).and_then(|(_, rest)| rest.split_once(':'));
        found.is_some_and(|(_, value)| value.trim().starts_with("true"))
    })
}

#[cfg(test)]
mod tests {
    use super::is_on;

    #[test]
    fn the_configuration_is_json_with_comments() {
        assert!(is_on("{ \"use_pci_p2pdma\": true, // yes\n}", "use_pci_p2pdma"));
        assert!(!is_on("// \"use_pci_p2pdma\": true\n\"use_pci_p2pdma\": false", "use_pci_p2pdma"));
    }
}
