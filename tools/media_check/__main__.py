from tools.media_check import main

main()
