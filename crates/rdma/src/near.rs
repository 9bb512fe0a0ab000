//! The RDMA devices, and which is nearest to a GPU.

use onehop_pci::{Address, PathClass, Root, Tree};

const NVIDIA: u16 = 0x10de;
/// The base class of GPUs.
const DISPLAY: u8 = 3;

/// A device, as the system lists it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its address; `None` for a software device.
    pub address: Option<Address>,
}

/// All devices of a system.
#[must_use]
pub fn listed(root: &Root) -> Vec<Listed> {
    let names = root.list("/sys/class/infiniband").unwrap_or_default();
    let one = |name: String| {
        let link = root.link_name(&format!("/sys/class/infiniband/{name}/device"));
        Listed { address: link.and_then(|last| last.parse().ok()), name }
    };
    names.into_iter().map(one).collect()
}

/// The devices with their distance to the nearest of these GPUs, nearest first; `None` if unknown. Equally distant
/// devices keep their order.
#[must_use]
pub fn by_distance(tree: &Tree, gpus: &[Address], devices: &[Listed]) -> Vec<(Listed, Option<PathClass>)> {
    let class = |one: &Listed| {
        let at = one.address?;
        gpus.iter().filter_map(|gpu| Some(tree.path(*gpu, at)?.class)).min()
    };
    let mut all: Vec<_> = devices.iter().map(|one| (one.clone(), class(one))).collect();
    all.sort_by_key(|(_, class)| (class.is_none(), *class));
    all
}

/// The names of a system's devices, those nearest to one of its NVIDIA GPUs first. If the topology is unknown, they
/// keep their order.
#[must_use]
pub fn nearest_first(root: &Root) -> Vec<String> {
    let devices = listed(root);
    let Ok(tree) = Tree::scan(root) else { return devices.into_iter().map(|one| one.name).collect() };
    let gpus = tree.devices.values().filter(|one| one.vendor == NVIDIA && one.class.base() == DISPLAY);
    let gpus: Vec<_> = gpus.map(|gpu| gpu.address).collect();
    by_distance(&tree, &gpus, &devices).into_iter().map(|(one, _)| one.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(name: &str) -> Root {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../doctor/fixtures");
        Root::open(&folder.join(name)).unwrap()
    }

    fn at(name: &str, address: &str) -> Listed {
        Listed { name: name.into(), address: address.parse().ok() }
    }

    #[test]
    fn a_card_below_the_gpus_switch_is_nearest() {
        let root = system("h100-switch-acs-on.json");
        let found = listed(&root);
        assert_eq!(found, [at("mlx5_0", "0000:1a:00.0")]);
        let gpu = "0000:18:00.0".parse().unwrap();
        // A software device, one beside the switch, and one below it: the drive, in place of a card.
        let all =
            [at("rxe0", "none"), at("above", "0000:15:00.0"), found[0].clone(), at("below", "0000:19:00.0")];
        let tree = Tree::scan(&root).unwrap();
        let order: Vec<_> =
            by_distance(&tree, &[gpu], &all).into_iter().map(|(one, class)| (one.name, class)).collect();
        let (pix, phb) = (Some(PathClass::Pix), Some(PathClass::Phb));
        let expected = [("mlx5_0", pix), ("below", pix), ("above", phb), ("rxe0", None)];
        assert_eq!(order, expected.map(|(name, class)| (name.to_owned(), class)));
        assert!(by_distance(&tree, &[], &all).iter().all(|(_, class)| class.is_none()));
        assert_eq!(nearest_first(&root), ["mlx5_0"]);
    }

    #[test]
    fn a_card_of_the_gpus_socket_is_nearer_than_one_of_the_other() {
        let root = system("epyc-two-sockets.json");
        assert!(listed(&root).is_empty());
        let tree = Tree::scan(&root).unwrap();
        let gpu = "0000:01:00.0".parse().unwrap();
        let all = [at("far", "0000:81:00.0"), at("near", "0000:00:01.1")];
        let order: Vec<_> = by_distance(&tree, &[gpu], &all).into_iter().map(|(one, _)| one.name).collect();
        assert_eq!(order, ["near", "far"]);
    }
}
