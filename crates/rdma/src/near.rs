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
