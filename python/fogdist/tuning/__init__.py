"""What to train with on which links: `network` has the links and sites, `prediction` the time of an exchange, `decision` the choice."""
