"""Whether a model gives a request the same bits whatever else happens: `pagedattn verify`."""
