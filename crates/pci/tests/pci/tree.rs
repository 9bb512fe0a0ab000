//! Composed systems, read like a real machine.

use onehop_pci::{Address, Error, PathClass, Record, Root, Tree};

use crate::compose::*;

fn at(text: &str) -> Address {
    text.parse().unwrap()
}

/// A GPU and a drive behind one switch, a second drive at its own root port, and one at another host bridge.
fn server() -> Machine {
    let mut machine = Machine::new("a switch");
    let ports = ["0000:00:01.0", "0000:01:00.0"];
    machine
        .add(&Function::port(ports[0], (0x8086, 1), ROOT_PORT).group(1, "DMA"))
        .add(&Function::port(ports[1], (0x1000, 0xc030), UPSTREAM).under(&ports[..1]))
        .add(&Function::port("0000:02:00.0", (0x1000, 0xc030), DOWNSTREAM).under(&ports).acs(ACS_ON))
        .add(&Function::port("0000:02:01.0", (0x1000, 0xc030), DOWNSTREAM).under(&ports).acs(0))
        .add(
            &Function::new("0000:03:00.0", (0x10de, 0x2330), 0x030200)
                .under(&[ports[0], ports[1], "0000:02:00.0"])
                .bar(0, 0x1000_0000, 16 << 20, MEM32)
                .bar(1, 0x20_0000_0000, 128 << 30, PREF64)
                .resizable(1, 37, 26, 37)
                .lanes((5, 16), (5, 16))
                .driver("nvidia")
                .group(7, "DMA-FQ")
                .node(0),
        )
        .add(
            &Function::new("0000:04:00.0", (0x144d, 0xa80a), 0x010802)
                .under(&[ports[0], ports[1], "0000:02:01.0"])
                .bar(0, 0x1100_0000, 16 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .driver("nvme")
                .node(0),
        )
        .add(&Function::port("0000:00:02.0", (0x8086, 2), ROOT_PORT))
        .add(&Function::new("0000:05:00.0", (0x144d, 0xa80a), 0x010802).under(&["0000:00:02.0"]).node(0))
        .add(&Function::new("0000:80:00.0", (0x144d, 0xa80a), 0x010802).host("pci0000:80").node(1))
        .add(&Function::new("0000:40:00.0", (0x144d, 0xa80a), 0x010802).host("pci0000:40").node(0));
    machine
}

#[test]
fn a_server_is_understood() {
    let tree = Tree::scan(&Root::recorded(server().0)).unwrap();
    assert_eq!((tree.devices.len(), tree.problems.len(), tree.hosts().len()), (10, 0, 3));
    let gpu = tree.get(at("0000:03:00.0")).unwrap();
    assert_eq!((gpu.driver.as_deref(), gpu.numa_node, gpu.parents.len()), (Some("nvidia"), Some(0), 3));
    assert_eq!((gpu.largest_bar().unwrap().size, gpu.link.now().as_deref()), (128 << 30, Some("Gen5 x16")));
    assert_eq!(gpu.title(), "NVIDIA H100 80GB HBM3");
    let resizable = gpu.config.as_ref().unwrap().resizable[0];
    assert_eq!((resizable.size, resizable.largest()), (128 << 30, 128 << 30));
    assert_eq!(tree.group_of(gpu).unwrap().translates(), Some(true));
    assert!(tree.devices.values().all(|device| device.problems.is_empty()));
    assert_eq!(tree.children("pci0000:00", Some(at("0000:01:00.0"))).count(), 2);
}

#[test]
fn paths_have_their_usual_class() {
    let tree = Tree::scan(&Root::recorded(server().0)).unwrap();
    let class = |from: &str, to: &str| tree.path(at(from), at(to)).unwrap().class;
    assert_eq!(class("0000:03:00.0", "0000:04:00.0"), PathClass::Pix);
    assert_eq!(class("0000:03:00.0", "0000:05:00.0"), PathClass::Phb);
    assert_eq!(class("0000:03:00.0", "0000:40:00.0"), PathClass::Node);
    assert_eq!(class("0000:03:00.0", "0000:80:00.0"), PathClass::Sys);
    let path = tree.path(at("0000:03:00.0"), at("0000:04:00.0")).unwrap();
    assert_eq!(path.common, Some(at("0000:01:00.0")));
    let ports = tree.access_control(&path);
    let redirects: Vec<_> =
        ports.iter().map(|(port, acs)| (port.to_string(), acs.unwrap().redirects())).collect();
    assert_eq!(redirects, [("0000:02:00.0".to_owned(), true), ("0000:02:01.0".to_owned(), false)]);
}

#[test]
fn a_user_sees_less_but_nothing_wrong() {
    let mut machine = Machine::new("not root");
    machine.add(&Function::port("0000:00:01.0", (1, 1), DOWNSTREAM).acs(ACS_ON).unprivileged());
    let below =
        |address| Function::new(address, (0x144d, 2), 0x010802).under(&["0000:00:01.0"]).unprivileged();
    machine.add(&below("0000:01:00.0")).add(&Function::new("0000:02:00.0", (1, 2), 0x030000));
    let tree = Tree::scan(&Root::recorded(machine.0)).unwrap();
    assert!(tree.get(at("0000:01:00.0")).unwrap().problems.is_empty());
    let path = tree.path(at("0000:01:00.0"), at("0000:02:00.0")).unwrap();
    assert_eq!(tree.access_control(&path), [(at("0000:00:01.0"), None)]);
}

#[test]
fn garbage_is_named_and_the_rest_is_read() {
    let mut machine = server();
    let drive = "/sys/bus/pci/devices/0000:05:00.0";
    machine.file(&format!("{drive}/resource"), "nonsense\n").file(&format!("{drive}/numa_node"), "many");
    machine.file(&format!("{drive}/current_link_speed"), "warp 9");
    machine.denied(&format!("{drive}/power_state"));
    machine.link(drive, "../../../devices/pci0000:00/0000:05:00.0/0000:05:00.0");
    machine.file("/sys/bus/pci/devices/0000:04:00.0/vendor", "none");
    machine.file("/sys/bus/pci/devices/not-an-address/vendor", "0x1");
    let gone =
        Function::new("0000:40:00.0", (1, 2), 0x010802).host("pci0000:40").raw_config(vec![0xff; 4096]);
    machine.add(&gone);
    let tree = Tree::scan(&Root::recorded(machine.0)).unwrap();
    assert_eq!((tree.devices.len(), tree.problems.len()), (9, 2));
    let drive = tree.get(at("0000:05:00.0")).unwrap();
    assert_eq!(drive.problems.len(), 4, "{:?}", drive.problems);
    assert!(
        drive.problems.iter().any(Error::is_denied) && drive.parents.is_empty() && drive.link.speed.is_none()
    );
    assert_eq!(tree.path(at("0000:05:00.0"), at("0000:03:00.0")), None);
    assert_eq!(tree.get(at("0000:40:00.0")).unwrap().problems.len(), 1);
}

#[test]
fn a_system_without_pci_has_no_devices() {
    let tree = Tree::scan(&Root::recorded(Record::new())).unwrap();
    assert!(tree.devices.is_empty() && tree.problems.is_empty());
    assert!(Root::open(std::path::Path::new("/nonexistent")).is_err());
}

#[test]
fn this_machine_can_be_read_and_replayed() {
    let here = Root::here().recording();
    let tree = Tree::scan(&here).unwrap();
    let bytes = here.record().unwrap().to_bytes();
    let again = Tree::scan(&Root::recorded(Record::parse(&bytes).unwrap())).unwrap();
    assert_eq!(serde_json::to_value(&tree).unwrap(), serde_json::to_value(&again).unwrap());
}
