//! Bring-up, identify, reads and writes: the basics for all other tests.

use crate::host::{Host, pattern};
use onehop_proto::admin::{self, cns};
use onehop_proto::{Status, identify, nvm};

const MODES: [&str; 2] = ["workers=0", "workers=1"];

#[test]
fn identifies_itself() {
    for mode in MODES {
        let mut host = Host::enabled(&format!("mem:64M?lba=4096&serial=ABC&model=M&{mode}"));
        let bytes = host.admin_data(admin::identify(cns::CONTROLLER, 0, 0, 0), 4096).unwrap();
        let id = identify::Controller::parse(&bytes).unwrap();
        assert!(id.sn() == "ABC" && id.mn() == "M");
        assert_eq!(id.mdts(), 5);
        let bytes = host.admin_data(admin::identify(cns::NAMESPACE, 1, 0, 0), 4096).unwrap();
        let ns = identify::Namespace::parse(&bytes).unwrap();
        assert_eq!(ns.nsze(), 64 << 8);
        assert_eq!(ns.format().unwrap().lba_bytes(), 4096);
        host.clean();
    }
}

#[test]
fn reads_back_what_was_written() {
    for mode in MODES {
        for (lba, len) in [(512, 512), (512, 4096), (512, 65536), (4096, 131072), (65536, 65536)] {
            let mut host = Host::new(&format!("mem:16M?lba={lba}&{mode}"));
            let data = pattern(len as u64, len);
            assert_eq!(host.write(7, &data, lba), Status::SUCCESS);
            assert_eq!(host.read(7, (len / lba) as u32, lba).unwrap(), data);
            assert_eq!(host.run(1, nvm::flush(1)).status(), Status::SUCCESS);
            host.clean();
        }
    }
}
