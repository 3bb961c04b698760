"""What several tests share: rigs, fakes and clients; no test of its own."""
