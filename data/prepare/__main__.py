from data.prepare import main

if __name__ == "__main__":
    main()
