//! Which RDMA devices there are, and which is nearest to a GPU.

use onehop_pci::{Address, PathClass, Root, Tree};

/// A device, as the system tells of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Where it is; none for one that is made of software.
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

/// The devices with how near they are to a GPU, the nearest first; none for those of which that is not told. Those that are
/// equally near stay in their order.
#[must_use]
pub fn by_distance(tree: &Tree, gpu: Address, devices: &[Listed]) -> Vec<(Listed, Option<PathClass>)> {
    let class = |one: &Listed| Some(tree.path(gpu, one.address?)?.class);
    let mut all: Vec<_> = devices.iter().map(|one| (one.clone(), class(one))).collect();
    all.sort_by_key(|(_, class)| (class.is_none(), *class));
    all
}

/// Those of them that are as near as the nearest: what a transfer is to be spread over.
#[must_use]
pub fn nearest(tree: &Tree, gpu: Address, devices: &[Listed]) -> Vec<Listed> {
    let all = by_distance(tree, gpu, devices);
    let Some(best) = all.first().map(|(_, class)| *class) else { return Vec::new() };
    all.into_iter().filter(|(_, class)| *class == best).map(|(one, _)| one).collect()
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
        // One that is made of software, one beside the switch, one below it: the drive, in the place of a card.
        let all =
            [at("rxe0", "none"), at("above", "0000:15:00.0"), found[0].clone(), at("below", "0000:19:00.0")];
        let tree = Tree::scan(&root).unwrap();
        let order: Vec<_> =
            by_distance(&tree, gpu, &all).into_iter().map(|(one, class)| (one.name, class)).collect();
        let (pix, phb) = (Some(PathClass::Pix), Some(PathClass::Phb));
        let expected = [("mlx5_0", pix), ("below", pix), ("above", phb), ("rxe0", None)];
        assert_eq!(order, expected.map(|(name, class)| (name.to_owned(), class)));
        let names: Vec<_> = nearest(&tree, gpu, &all).into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["mlx5_0", "below"]);
        // Where nothing is told of any, all are equally good.
        assert_eq!(nearest(&tree, gpu, &all[..1]).len(), 1);
        assert!(nearest(&tree, gpu, &[]).is_empty());
    }

    #[test]
    fn a_card_of_the_gpus_socket_is_nearer_than_one_of_the_other() {
        let root = system("epyc-two-sockets.json");
        assert!(listed(&root).is_empty());
        let tree = Tree::scan(&root).unwrap();
        let gpu = "0000:01:00.0".parse().unwrap();
        let all = [at("far", "0000:81:00.0"), at("near", "0000:00:01.1")];
        let order: Vec<_> = by_distance(&tree, gpu, &all).into_iter().map(|(one, _)| one.name).collect();
        assert_eq!(order, ["near", "far"]);
    }
}
